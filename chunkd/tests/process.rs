//! The process as an agent and programs of the host see it: it is killed while they read.

mod common;

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use chunkd::manifest::CHUNK;
use chunkd::nbd::client::{Handshake, Next, Part};
use chunkd::nbd::{Request, command};
use chunkd::tickets::ticket;
use common::{Content, IMAGE, serving_key};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tempfile::TempDir;

const WITHIN: Duration = Duration::from_secs(60);

fn hex(key: &[u8; 32]) -> String {
    blake3::Hash::from(*key).to_hex().to_string()
}

/// A process, and the agent's connection to it.
struct Chunkd {
    folder: TempDir,
    process: Child,
    control: UnixStream,
}

impl Chunkd {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (process, control) = Self::start(folder.path(), "127.0.0.1:0");
        let chunkd = Self { folder, process, control };
        chunkd.call(&json!({ "call": "add-member", "path": chunkd.path("pool"), "limit": 256 << 20, "make": true }));
        chunkd
    }

    fn start(folder: &Path, listen: &str) -> (Child, UnixStream) {
        let process = Command::new(env!("CARGO_BIN_EXE_virtman-chunkd"))
            .args(["--manifests".as_ref(), folder.join("manifests").as_os_str(), "--listen".as_ref(), listen.as_ref()])
            .args(["--control".as_ref(), folder.join("control").as_os_str()])
            .args(["--vms".as_ref(), folder.join("vms").as_os_str()])
            .stderr(Stdio::from(File::options().create(true).append(true).open(folder.join("log")).unwrap()))
            .spawn()
            .unwrap();
        let control = retry(|| UnixStream::connect(folder.join("control")).ok());
        (process, control)
    }

    /// As kill -9, and an agent that starts it again at the same address.
    fn kill(&mut self) {
        let address = self.call(&json!({ "call": "status" }))["address"].as_str().unwrap().to_owned();
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        (self.process, self.control) = Self::start(self.folder.path(), &address);
        self.call(&json!({ "call": "add-member", "path": self.path("pool"), "limit": 256 << 20, "make": true }));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn call(&self, call: &Value) -> Value {
        let answer = self.say(call, None);
        assert_eq!(None, answer.get("error"), "{call}");
        answer
    }

    /// One call and its answer; `file` goes along.
    fn say(&self, call: &Value, file: Option<&File>) -> Value {
        send(&self.control, call, file);
        let mut answer = String::new();
        BufReader::new(&self.control).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn spec(content: &Content) -> Value {
        json!({
            "call": "serve", "name": IMAGE, "key": content.key, "size": content.data.len(), "digest": content.digest,
        })
    }

    fn publish(&self, content: &Content) {
        std::fs::write(self.path("content"), &content.data).unwrap();
        std::fs::write(self.path("manifests").join(&content.key), &content.manifest).unwrap();
        let mut spec = Self::spec(content);
        spec["mark"] = "1".into();
        let answer = self.say(&spec, Some(&File::open(self.path("content")).unwrap()));
        assert_eq!(json!({}), answer);
        self.call(&json!({
            "call": "admit", "image": IMAGE, "serving_key": hex(&serving_key().0.0), "revision": 1, "children": ["one"],
            "new": true,
        }));
    }

    fn attach(&self, content: &Content, origin: &Self) {
        let mut spec = Self::spec(content);
        spec["parents"] = json!([{
            "host": "origin",
            "address": origin.call(&json!({ "call": "status" }))["address"],
            "identity": format!("{IMAGE}/one/1"),
            "secret": hex(&ticket(&serving_key().0, "one", 1).unwrap().0),
        }]);
        self.call(&spec);
    }

    /// A range, as a program of the host reads it that connects again when the connection ends.
    fn read(&self, export: &str, offset: u64, length: u32) -> Vec<u8> {
        retry(|| read_once(&self.path("vms"), export, offset, length).ok())
    }
}

impl Drop for Chunkd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One call; `file` goes along.
fn send(agent: &UnixStream, call: &Value, file: Option<&File>) {
    let line = format!("{call}\n");
    if let Some(file) = file {
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        let whole = [IoSlice::new(line.as_bytes())];
        let sent = rustix::net::sendmsg(agent, &whole, &mut ancillary, SendFlags::empty()).unwrap();
        assert_eq!(line.len(), sent);
    } else {
        (&*agent).write_all(line.as_bytes()).unwrap();
    }
}

fn retry<T>(mut act: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(done) = act() {
            return done;
        }
        assert!(begun.elapsed() < WITHIN, "in time");
        sleep(Duration::from_millis(2));
    }
}

fn read_once(socket: &Path, export: &str, offset: u64, length: u32) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(WITHIN))?;
    let mut handshake = Handshake::new(export, false);
    let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
    while handshake.next(&mut input, &mut output).map_err(io::Error::other)? == Next::More {
        stream.write_all(&output)?;
        output.clear();
        receive(&mut stream, &mut input)?;
    }
    Request { flags: 0, kind: command::READ, cookie: 7, offset, length }.put(&mut output);
    stream.write_all(&output)?;
    while input.len() < Part::LENGTH + 8 + length as usize {
        receive(&mut stream, &mut input)?;
    }
    let part = Part::take(&mut input).map_err(io::Error::other)?.unwrap();
    assert_eq!((true, 7, 8 + length), (part.last, part.cookie, part.length));
    Ok(input[8..].to_vec())
}

fn receive(stream: &mut UnixStream, input: &mut BytesMut) -> io::Result<()> {
    let mut part = [0; 16 << 10];
    let read = stream.read(&mut part)?;
    input.extend_from_slice(&part[..read]);
    if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

#[test]
fn it_is_killed_again_and_again_and_every_byte_is_right() {
    let content = Content::new(4 << 20);
    let (mut origin, mut host) = (Chunkd::new(), Chunkd::new());
    origin.publish(&content);
    host.attach(&content, &origin);
    let rounds = if std::env::var_os("WHOLE").is_some() { 50 } else { 4 };
    for round in 0..rounds {
        if round % 2 == 0 {
            host.kill();
            host.attach(&content, &origin);
        } else {
            origin.kill();
            origin.publish(&content);
        }
        for offset in [round * 65_000 % (3 << 20), 0, 1 << 20] {
            let wanted = &content.data[usize::try_from(offset).unwrap()..][..300_000];
            assert!(host.read(&content.key, offset, 300_000) == wanted, "round {round}");
        }
    }
}

#[test]
fn what_was_kept_outlives_a_kill_and_is_not_fetched_again() {
    let content = Content::new(1 << 20);
    let (origin, mut host) = (Chunkd::new(), Chunkd::new());
    origin.publish(&content);
    host.attach(&content, &origin);
    assert_eq!(content.data, host.read(IMAGE, 0, 1 << 20)); // people may ask by the image's name
    let held = (1 << 20) - 2 * CHUNK;
    retry(|| (host.call(&json!({ "call": "status" }))["held"] == held).then_some(()));
    host.kill();
    host.attach(&content, &origin);
    assert_eq!(content.data, host.read(&content.key, 0, 1 << 20));
    let status = host.call(&json!({ "call": "status" }));
    assert_eq!((json!(0), json!(held)), (status["images"][0]["fetched"].clone(), status["held"].clone()));
    retry(|| {
        host.read(&content.key, 0, 1 << 20);
        let hits = host.call(&json!({ "call": "status" }))["images"][0]["hits"].as_u64();
        (hits > Some(0)).then_some(()) // the kernel may have given memory back, and then a read waits for the disk
    });
    assert_eq!(json!({ "keys": [content.key] }), host.call(&json!({ "call": "kept" })));
}

#[test]
fn bad_calls_are_answered_by_one_sentence_and_change_nothing() {
    let (chunkd, content) = (Chunkd::new(), Content::new(1 << 20));
    for bad in [
        json!({ "call": "fly" }),
        json!({ "call": "serve", "name": IMAGE }),
        json!({ "call": "fill", "image": "another", "ranges": [] }),
        json!({ "call": "limits", "up": 0 }),
        json!({ "call": "add-member", "path": "/proc/version", "limit": 1 << 30 }),
        {
            let mut spec = Chunkd::spec(&content);
            spec["key"] = "../key".into();
            spec
        },
        {
            let mut spec = Chunkd::spec(&content);
            spec["size"] = 1000.into();
            spec
        },
        {
            let mut spec = Chunkd::spec(&content);
            spec["digest"] = "blake3-64k:1".into();
            spec
        },
        {
            let mut spec = Chunkd::spec(&content);
            spec["mark"] = "1".into();
            spec
        },
    ] {
        let answer = chunkd.say(&bad, None);
        assert!(
            answer["error"].as_str().is_some_and(|said| !said.is_empty() && !said.contains('\n')),
            "{bad}: {answer}"
        );
    }
    assert_eq!(json!([]), chunkd.call(&json!({ "call": "status" }))["images"]);
    assert_eq!(json!({ "keys": [] }), chunkd.call(&json!({ "call": "kept" })));
}

#[test]
fn what_an_agent_that_hangs_up_wanted_in_a_file_is_not_written() {
    let content = Content::new(8 << 20);
    let (origin, host) = (Chunkd::new(), Chunkd::new());
    origin.publish(&content);
    host.attach(&content, &origin);
    host.call(&json!({ "call": "limits", "down": 1 << 20 }));
    let file = File::create(host.path("wanted")).unwrap();
    let agent = UnixStream::connect(host.path("control")).unwrap();
    let get = json!({ "call": "get", "image": IMAGE, "ranges": [[0, 8 << 20]] });
    send(&agent, &get, Some(&file));
    retry(|| (file.metadata().unwrap().len() > 0).then_some(()));
    drop(agent);
    host.call(&json!({ "call": "limits" }));
    host.read(IMAGE, 0, 8 << 20); // what would be written is all here
    let written = file.metadata().unwrap().len();
    assert!(written < 8 << 20, "{written}");
}

#[test]
fn limits_are_shown_and_each_call_tells_all_of_them() {
    let chunkd = Chunkd::new();
    for (told, shown) in [
        (json!({ "call": "limits", "up": 1000, "connections": 7 }), json!([1000, null, 7])),
        (json!({ "call": "limits", "down": 10 }), json!([null, 10, 4096])),
    ] {
        chunkd.call(&told);
        let limits = &chunkd.call(&json!({ "call": "status" }))["limits"];
        assert_eq!(shown, json!([limits["up"], limits["down"], limits["connections"]]));
    }
}

#[test]
fn a_pin_may_come_before_its_image_and_there_is_no_boot_set_before_a_boot() {
    let (chunkd, content) = (Chunkd::new(), Content::new(1 << 20));
    for until in [u64::MAX, 0] {
        chunkd.call(&json!({ "call": "pin", "key": content.key, "until": until }));
    }
    chunkd.call(&Chunkd::spec(&content));
    assert_eq!(json!({ "ranges": null }), chunkd.call(&json!({ "call": "boot-set", "image": IMAGE })));
}

#[test]
fn a_crash_leaves_no_core_with_secrets() {
    let chunkd = Chunkd::new();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", chunkd.process.id())).unwrap();
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
    assert_eq!(["0", "0"], core.split_whitespace().take(2).collect::<Vec<_>>()[..]);
}

#[test]
fn it_may_open_as_many_files_as_it_is_let() {
    let chunkd = Chunkd::new();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", chunkd.process.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let files: Vec<_> = files.split_whitespace().collect();
    assert_eq!(files[0], files[1]);
}

#[test]
fn no_secret_is_on_the_command_line_or_in_the_log() {
    let (origin, host) = (Chunkd::new(), Chunkd::new());
    let content = Content::new(1 << 20);
    origin.publish(&content);
    host.attach(&content, &origin);
    host.read(IMAGE, 0, 4096);
    let secrets = [hex(&serving_key().0.0), hex(&ticket(&serving_key().0, "one", 1).unwrap().0)];
    for chunkd in [&origin, &host] {
        let line = std::fs::read(format!("/proc/{}/cmdline", chunkd.process.id())).unwrap();
        let said = [line, std::fs::read(chunkd.path("log")).unwrap()].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(secrets.iter().all(|secret| !said.contains(secret)));
    }
}
