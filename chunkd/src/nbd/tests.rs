//! Both sides of the handshake against each other, and against noise.

use bytes::{Buf, BufMut, BytesMut};
use proptest::prelude::*;

use super::server::{Next, Security};
use super::{MOST_READ, Replies, Request, Violation, chunk, client, command, option, server};

const SIZE: u64 = 5 << 30;

/// A server with one export.
struct Server {
    handshake: server::Handshake,
    output: BytesMut,
}

impl Server {
    fn new(security: Security) -> Self {
        let mut output = BytesMut::new();
        server::Handshake::greet(&mut output);
        Self { handshake: server::Handshake::new(security), output }
    }

    /// Goes on until more is needed than the name of the export.
    fn next(&mut self, input: &mut BytesMut) -> Result<Next, Violation> {
        let mut next = Next::More;
        loop {
            next = match next {
                Next::Find(name) => {
                    let size = (name == "disk").then_some(SIZE);
                    match self.handshake.found(size, &mut self.output) {
                        Next::More => self.handshake.next(input, &mut self.output)?,
                        other => return Ok(other),
                    }
                }
                Next::More => match self.handshake.next(input, &mut self.output)? {
                    Next::More => return Ok(Next::More),
                    other => other,
                },
                Next::List => {
                    server::Handshake::list(["disk", "other"], &mut self.output);
                    Next::More
                }
                other => return Ok(other),
            };
        }
    }
}

fn option(kind: u32, data: &[u8]) -> BytesMut {
    let mut bytes = BytesMut::new();
    bytes.put_slice(b"IHAVEOPT");
    bytes.put_u32(kind);
    bytes.put_u32(u32::try_from(data.len()).unwrap());
    bytes.put_slice(data);
    bytes
}

/// The flags of a client, and these options.
fn said(options: &[BytesMut]) -> BytesMut {
    let mut bytes = BytesMut::from(&[0, 0, 0, 3][..]);
    for option in options {
        bytes.put_slice(option);
    }
    bytes
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(rest);
    data
}

fn contexts(query: &str) -> Vec<u8> {
    named("disk", &[&1u32.to_be_bytes()[..], &named(query, &[])].concat())
}

/// The answers to options: kind and data.
fn answers(mut output: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut found = Vec::new();
    while output.len() >= 20 {
        let number = |at: usize| u32::from_be_bytes(output[at..at + 4].try_into().unwrap());
        let (kind, length) = (number(12), number(16) as usize);
        found.push((kind, output[20..20 + length].to_vec()));
        output = &output[20 + length..];
    }
    found
}

/// Lets both sides speak until the client may send requests. Returns what each side then knows.
fn speak(security: Security, export: &str) -> Result<(u64, Next), Violation> {
    let mut server = Server::new(security);
    let mut client = client::Handshake::new(export, security == Security::Required);
    let (mut to_client, mut to_server) = (server.output.split(), BytesMut::new());
    let mut agreed = Next::More;
    loop {
        match client.next(&mut to_client, &mut to_server)? {
            client::Next::Ready(size) => return Ok((size, agreed)),
            client::Next::StartTls => {
                assert_eq!(Next::StartTls, agreed);
                server.handshake.encrypted();
                client.encrypted(&mut to_server);
            }
            client::Next::More => {}
        }
        agreed = server.next(&mut to_server)?;
        to_client.unsplit(server.output.split());
    }
}

#[test]
fn client_and_server_agree() {
    let replies = Replies { structured: true, allocation: false };
    for security in [Security::Plain, Security::Required] {
        assert_eq!(Ok((SIZE, Next::Ready("disk".to_owned(), replies))), speak(security, "disk"));
    }
}

#[test]
fn a_client_hears_that_there_is_no_such_export() {
    assert!(
        matches!(speak(Security::Plain, "nothing"), Err(Violation::Refused(said)) if said.contains("no such image"))
    );
}

#[test]
fn nothing_is_told_before_tls() {
    let mut server = Server::new(Security::Required);
    server.output.clear();
    let options = [option(option::LIST, &[]), option(option::GO, &named("disk", &[0, 0]))];
    assert_eq!(Ok(Next::More), server.next(&mut said(&options)));
    let kinds: Vec<u32> = answers(&server.output).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!([super::answer::ERR_TLS_REQD; 2], kinds[..]);
    let old = said(&[option(option::EXPORT_NAME, b"disk")]);
    assert!(Server::new(Security::Required).next(&mut old.clone()).is_err());
}

#[test]
fn what_comes_before_encryption_is_not_believed() {
    let together = [option(option::STARTTLS, &[]), option(option::GO, &named("disk", &[0, 0]))];
    assert!(Server::new(Security::Required).next(&mut said(&together)).is_err());
}

#[test]
fn an_old_client_gets_the_export_and_as_many_zeros_as_it_expects() {
    for (flags, zeros) in [(3, 0), (1, 124)] {
        let mut server = Server::new(Security::Plain);
        server.output.clear();
        let mut input = said(&[option(option::EXPORT_NAME, b"disk")]);
        input[3] = flags;
        assert_eq!(Ok(Next::Ready("disk".to_owned(), Replies::default())), server.next(&mut input));
        assert_eq!(SIZE.to_be_bytes(), server.output[..8]);
        assert_eq!(10 + zeros, server.output.len());
    }
}

#[test]
fn the_context_needs_structured_replies_and_counts_for_its_export_only() {
    let structured = option(option::STRUCTURED_REPLY, &[]);
    let set = option(option::SET_META_CONTEXT, &contexts("base:allocation"));
    let go = option(option::GO, &named("disk", &[0, 0]));
    let ready = |structured, allocation| Ok(Next::Ready("disk".to_owned(), Replies { structured, allocation }));
    let agreed = |options: &[&BytesMut]| {
        let options: Vec<BytesMut> = options.iter().map(|&option| option.clone()).collect();
        Server::new(Security::Plain).next(&mut said(&options))
    };
    assert_eq!(ready(true, true), agreed(&[&structured, &set, &go]));
    assert_eq!(ready(false, false), agreed(&[&set, &go]));
    let unknown = option(option::SET_META_CONTEXT, &contexts("qemu:dirty-bitmap"));
    assert_eq!(ready(true, false), agreed(&[&structured, &unknown, &go]));
    assert_eq!(ready(true, false), agreed(&[&structured, &set, &unknown, &go]));
}

#[test]
fn exports_are_listed_and_unknown_options_refused() {
    let mut server = Server::new(Security::Plain);
    server.output.clear();
    let options = [option(option::LIST, &[]), option(99, b"?"), option(option::ABORT, &[])];
    assert_eq!(Ok(Next::End), server.next(&mut said(&options)));
    let said = answers(&server.output);
    assert_eq!([named("disk", &[]), named("other", &[])], [said[0].1.clone(), said[1].1.clone()]);
    assert_eq!([super::answer::ACK, super::answer::ERR_UNSUP, super::answer::ACK], [said[2].0, said[3].0, said[4].0]);
}

#[test]
fn an_option_that_is_too_long_is_not_waited_for() {
    let mut long = said(&[option(option::LIST, &[])]);
    let length = long.len();
    long[length - 4..].copy_from_slice(&(1u32 << 30).to_be_bytes());
    assert_eq!(Err(Violation::LongOption(1 << 30)), Server::new(Security::Plain).next(&mut long));
}

#[test]
fn a_range_beyond_the_end_is_none() {
    let range = |offset, length| Request { flags: 0, kind: command::READ, cookie: 1, offset, length }.range(SIZE);
    assert_eq!(Some(SIZE - 512..SIZE), range(SIZE - 512, 512));
    let beyond = [range(SIZE - 511, 512), range(SIZE, 1), range(0, 0), range(u64::MAX, MOST_READ)];
    assert!(beyond.iter().all(Option::is_none));
}

/// A sparse answer with these data, and the data that are read from it.
fn sparse(data: &[u8]) -> (usize, Vec<u8>) {
    let request = Request { flags: 0, kind: command::READ, cookie: 3, offset: 1 << 40, length: 0 };
    let mut output = BytesMut::new();
    Replies { structured: true, allocation: false }.sparse(&mut output, &request, data);
    let (sent, mut read) = (output.len(), Vec::new());
    loop {
        let part = client::Part::take(&mut output).unwrap().unwrap();
        assert_eq!((3, request.offset + read.len() as u64), (part.cookie, output.get_u64()));
        match part.kind {
            chunk::OFFSET_HOLE => read.resize(read.len() + output.get_u32() as usize, 0),
            kind => {
                assert_eq!(chunk::OFFSET_DATA, kind);
                read.extend(output.split_to(part.length as usize - 8));
            }
        }
        if part.last {
            assert!(output.is_empty());
            return (sent, read);
        }
    }
}

#[test]
fn zeros_of_a_sparse_answer_do_not_travel() {
    let (sent, _) = sparse(&[vec![0; 60_000], vec![1; 600], vec![0; 60_000]].concat());
    assert!(sent < 2000, "{sent} bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("WHOLE").is_some() { 1_000_000 } else { 2_000 }))]

    #[test]
    fn a_sparse_answer_has_all_of_the_data(runs in prop::collection::vec((0u8..2, 1usize..3000), 1..8)) {
        let data: Vec<u8> = runs.into_iter().flat_map(|(byte, length)| vec![byte; length]).collect();
        prop_assert_eq!(&data, &sparse(&data).1);
    }

    /// However the bytes come, and whatever they are: no panic, and no more memory than one option.
    #[test]
    fn noise_never_panics(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..16), whole in any::<bool>(),
    ) {
        let begin = if whole { said(&[option(option::STRUCTURED_REPLY, &[])]) } else { BytesMut::new() };
        let mut server = Server::new(Security::Plain);
        let mut client = client::Handshake::new("disk", false);
        let (mut to_server, mut to_client, mut output) = (begin.clone(), BytesMut::new(), BytesMut::new());
        for part in parts {
            to_server.put_slice(&part);
            to_client.put_slice(&part);
            if server.next(&mut to_server).is_err() && client.next(&mut to_client, &mut output).is_err() {
                break;
            }
        }
    }

    /// Options with any data, which a client that speaks the protocol sends.
    #[test]
    fn any_option_is_answered(options in prop::collection::vec((0u32..12, prop::collection::vec(any::<u8>(), 0..40)), 0..8)) {
        let options: Vec<BytesMut> = options.iter().map(|(kind, data)| option(*kind, data)).collect();
        let _ = Server::new(Security::Plain).next(&mut said(&options));
        let _ = Server::new(Security::Required).next(&mut said(&options));
    }

    /// The way in which bytes are cut into packets changes nothing.
    #[test]
    fn packets_change_nothing(cut in 1usize..40) {
        let options = [
            option(option::STRUCTURED_REPLY, &[]),
            option(option::SET_META_CONTEXT, &contexts("base:allocation")),
            option(option::INFO, &named("other", &[0, 0])),
            option(option::GO, &named("disk", &[0, 0])),
        ];
        let (mut at_once, mut in_parts) = (Server::new(Security::Plain), Server::new(Security::Plain));
        let wanted = at_once.next(&mut said(&options));
        let (mut input, mut next) = (BytesMut::new(), Ok(Next::More));
        for part in said(&options).chunks(cut) {
            input.put_slice(part);
            next = in_parts.next(&mut input);
        }
        prop_assert_eq!(wanted, next);
        prop_assert_eq!(at_once.output, in_parts.output);
    }
}
