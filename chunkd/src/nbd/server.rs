//! The server's side of the handshake.

use bytes::{Buf, BufMut, BytesMut};

use super::{
    ALLOCATION, ALLOCATION_ID, EXPORT_FLAGS, GREETING_MAGIC, LONGEST_NAME, MOST_READ, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    Replies, Violation, answer, expect, greeting, info, option,
};

/// Bytes of an option, without its header: a name and some queries.
const LONGEST_OPTION: u32 = 16 << 10;

/// Bytes that a client should ask for at once: a chunk.
const PREFERRED: u32 = 64 << 10;

/// Whether a connection has to be encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    Plain,
    /// Nothing is told before TLS.
    Required,
    Encrypted,
}

/// What the handshake needs of its caller next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Send the output, and call again with more input.
    More,
    /// Send the output, make the connection encrypted, and call `encrypted`.
    StartTls,
    /// Look for an export of this name, and call `found`.
    Find(String),
    /// Call `list` with the names of all exports.
    List,
    /// Send the output; what follows are requests for the export of this name.
    Ready(String, Replies),
    /// Send the output and hang up.
    End,
}

/// Why an export was looked for.
#[derive(Debug)]
enum Asked {
    Name,
    Info,
    Go,
    ListContexts { queries: Vec<String> },
    SetContexts { queries: Vec<String> },
}

/// One connection's handshake. It never holds more than one option.
#[derive(Debug)]
pub struct Handshake {
    security: Security,
    flags: Option<u32>,
    asked: Option<(Asked, String)>,
    structured: bool,
    /// The export of which the client wants the context `base:allocation`.
    allocation_of: Option<String>,
}

impl Handshake {
    #[must_use]
    pub fn new(security: Security) -> Self {
        Self { security, flags: None, asked: None, structured: false, allocation_of: None }
    }

    /// What the server sends first.
    pub fn greet(output: &mut BytesMut) {
        output.put_u64(GREETING_MAGIC);
        output.put_u64(OPTION_MAGIC);
        output.put_u16(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
    }

    /// Goes on with what the client has sent.
    ///
    /// # Errors
    /// The client does not speak the protocol.
    pub fn next(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> Result<Next, Violation> {
        loop {
            if self.flags.is_none() {
                if input.len() < 4 {
                    return Ok(Next::More);
                }
                self.flags = Some(Self::known(input.get_u32())?);
            }
            let Some((kind, data)) = Self::take(input)? else {
                return Ok(Next::More);
            };
            if let Some(next) = self.option(kind, &data, input, output)? {
                return Ok(next);
            }
        }
    }

    fn known(flags: u32) -> Result<u32, Violation> {
        let known = u32::from(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
        if flags & !known == 0 { Ok(flags) } else { Err(Violation::Nonsense("the client has unknown flags")) }
    }

    fn take(input: &mut BytesMut) -> Result<Option<(u32, BytesMut)>, Violation> {
        const HEADER: usize = 16;
        if input.len() < HEADER {
            return Ok(None);
        }
        let mut header = &input[..HEADER];
        expect("an option", header.get_u64(), OPTION_MAGIC)?;
        let (kind, length) = (header.get_u32(), header.get_u32());
        if length > LONGEST_OPTION {
            return Err(Violation::LongOption(length));
        }
        if input.len() < HEADER + length as usize {
            return Ok(None);
        }
        input.advance(HEADER);
        Ok(Some((kind, input.split_to(length as usize))))
    }

    fn option(
        &mut self,
        kind: u32,
        data: &[u8],
        input: &BytesMut,
        output: &mut BytesMut,
    ) -> Result<Option<Next>, Violation> {
        match (kind, self.security) {
            (option::ABORT, _) => {
                reply(output, kind, answer::ACK, &[]);
                return Ok(Some(Next::End));
            }
            (option::STARTTLS, Security::Required) if data.is_empty() => {
                // What was sent before encryption must not count as sent by who proves himself later.
                if !input.is_empty() {
                    return Err(Violation::Nonsense("the client sends on after it asked for TLS"));
                }
                reply(output, kind, answer::ACK, &[]);
                return Ok(Some(Next::StartTls));
            }
            (option::STARTTLS, Security::Plain) => reply(output, kind, answer::ERR_POLICY, b"no TLS here"),
            (option::STARTTLS, _) => reply(output, kind, answer::ERR_INVALID, &[]),
            (option::EXPORT_NAME, Security::Required) => return Err(Violation::Nonsense("no TLS")),
            (_, Security::Required) => reply(output, kind, answer::ERR_TLS_REQD, b"TLS first"),
            _ => return self.plain_option(kind, data, output),
        }
        Ok(None)
    }

    fn plain_option(&mut self, kind: u32, data: &[u8], output: &mut BytesMut) -> Result<Option<Next>, Violation> {
        match kind {
            option::EXPORT_NAME => {
                let name = Fields(data).text(data.len()).ok_or(Violation::Nonsense("a name that is no text"))?;
                return Ok(Some(self.find(Asked::Name, name)));
            }
            option::LIST if data.is_empty() => return Ok(Some(Next::List)),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                reply(output, kind, answer::ACK, &[]);
            }
            option::INFO | option::GO => match Fields(data).info() {
                Some(name) => {
                    let asked = if kind == option::GO { Asked::Go } else { Asked::Info };
                    return Ok(Some(self.find(asked, name)));
                }
                None => reply(output, kind, answer::ERR_INVALID, &[]),
            },
            option::SET_META_CONTEXT | option::LIST_META_CONTEXT => match Fields(data).contexts() {
                Some((name, queries)) if self.structured => {
                    let asked = if kind == option::SET_META_CONTEXT {
                        Asked::SetContexts { queries }
                    } else {
                        Asked::ListContexts { queries }
                    };
                    return Ok(Some(self.find(asked, name)));
                }
                _ => reply(output, kind, answer::ERR_INVALID, &[]),
            },
            option::LIST | option::STRUCTURED_REPLY => reply(output, kind, answer::ERR_INVALID, &[]),
            _ => reply(output, kind, answer::ERR_UNSUP, &[]),
        }
        Ok(None)
    }

    fn find(&mut self, asked: Asked, name: String) -> Next {
        self.asked = Some((asked, name.clone()));
        Next::Find(name)
    }

    /// The connection is encrypted from now on.
    pub fn encrypted(&mut self) {
        self.security = Security::Encrypted;
    }

    /// The answer to `Next::List`. Call `next` then.
    pub fn list<'a>(names: impl IntoIterator<Item = &'a str>, output: &mut BytesMut) {
        for name in names {
            let mut data = BytesMut::new();
            put_text(&mut data, name);
            reply(output, option::LIST, answer::SERVER, &data);
        }
        reply(output, option::LIST, answer::ACK, &[]);
    }

    /// The answer to `Next::Find`: the size of the export in bytes, if there is one. Call `next` after `Next::More`.
    pub fn found(&mut self, size: Option<u64>, output: &mut BytesMut) -> Next {
        let Some((asked, name)) = self.asked.take() else {
            return Next::End;
        };
        let kind = asked.kind();
        let Some(size) = size else {
            if matches!(asked, Asked::Name) {
                return Next::End; // this option has no way to say no
            }
            reply(output, kind, answer::ERR_UNKNOWN, b"no such image here");
            return Next::More;
        };
        match asked {
            Asked::Name => {
                output.put_u64(size);
                output.put_u16(EXPORT_FLAGS);
                if self.flags.unwrap_or(0) & u32::from(greeting::NO_ZEROES) == 0 {
                    output.put_bytes(0, 124);
                }
                self.ready(name)
            }
            Asked::Info | Asked::Go => {
                let mut data = BytesMut::new();
                data.put_u16(info::EXPORT);
                data.put_u64(size);
                data.put_u16(EXPORT_FLAGS);
                reply(output, kind, answer::INFO, &data);
                data.clear();
                data.put_u16(info::BLOCK_SIZE);
                data.put_u32(1);
                data.put_u32(PREFERRED);
                data.put_u32(MOST_READ);
                reply(output, kind, answer::INFO, &data);
                reply(output, kind, answer::ACK, &[]);
                if kind == option::GO { self.ready(name) } else { Next::More }
            }
            Asked::ListContexts { queries } => {
                if queries.is_empty() || selects(&queries) {
                    put_context(output, kind, 0);
                }
                reply(output, kind, answer::ACK, &[]);
                Next::More
            }
            Asked::SetContexts { queries } => {
                self.allocation_of = None;
                if selects(&queries) {
                    put_context(output, kind, ALLOCATION_ID);
                    self.allocation_of = Some(name);
                }
                reply(output, kind, answer::ACK, &[]);
                Next::More
            }
        }
    }

    fn ready(&self, name: String) -> Next {
        let allocation = self.structured && self.allocation_of.as_ref() == Some(&name);
        Next::Ready(name, Replies { structured: self.structured, allocation })
    }
}

impl Asked {
    fn kind(&self) -> u32 {
        match self {
            Self::Name => option::EXPORT_NAME,
            Self::Info => option::INFO,
            Self::Go => option::GO,
            Self::ListContexts { .. } => option::LIST_META_CONTEXT,
            Self::SetContexts { .. } => option::SET_META_CONTEXT,
        }
    }
}

/// Whether one of the queries means the one context that there is: by its name, or by its namespace.
fn selects(queries: &[String]) -> bool {
    queries.iter().any(|query| query == ALLOCATION || query == "base:")
}

fn put_context(output: &mut BytesMut, kind: u32, id: u32) {
    let mut data = BytesMut::new();
    data.put_u32(id);
    data.put_slice(ALLOCATION.as_bytes());
    reply(output, kind, answer::META_CONTEXT, &data);
}

fn put_text(output: &mut BytesMut, text: &str) {
    output.put_u32(u32::try_from(text.len()).unwrap_or(u32::MAX));
    output.put_slice(text.as_bytes());
}

fn reply(output: &mut BytesMut, kind: u32, answer: u32, data: &[u8]) {
    output.put_u64(OPTION_REPLY_MAGIC);
    output.put_u32(kind);
    output.put_u32(answer);
    output.put_u32(u32::try_from(data.len()).unwrap_or(u32::MAX));
    output.put_slice(data);
}

/// What is left of an option's data.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn text(&mut self, length: usize) -> Option<String> {
        if length > LONGEST_NAME || length > self.0.len() {
            return None;
        }
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    fn number(&mut self) -> Option<u32> {
        (self.0.len() >= 4).then(|| self.0.get_u32())
    }

    fn counted_text(&mut self) -> Option<String> {
        let length = self.number()?;
        self.text(length as usize)
    }

    /// The name in `INFO` and `GO`. What the client wants to know is no matter: all is told.
    fn info(&mut self) -> Option<String> {
        let name = self.counted_text()?;
        let count = if self.0.len() >= 2 { self.0.get_u16() } else { return None };
        (self.0.len() == usize::from(count) * 2).then_some(name)
    }

    fn contexts(&mut self) -> Option<(String, Vec<String>)> {
        let name = self.counted_text()?;
        let mut queries = Vec::new();
        for _ in 0..self.number()? {
            queries.push(self.counted_text()?);
        }
        self.0.is_empty().then_some((name, queries))
    }
}
