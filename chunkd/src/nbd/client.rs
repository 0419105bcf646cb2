//! The client's side of the handshake, and of structured replies.

use bytes::{Buf, BufMut, BytesMut};

use super::{
    CHUNK_MAGIC, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Violation, answer, chunk, expect, greeting, info,
    option,
};

/// Bytes of an answer to an option: what a server says in an error at most.
const LONGEST_ANSWER: u32 = 16 << 10;

/// What the handshake needs of its caller next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Send the output, and call again with more input.
    More,
    /// Make the connection encrypted, and call `encrypted`.
    StartTls,
    /// Requests may be sent. The size of the export in bytes.
    Ready(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    Tls,
    Structured,
    Go,
}

/// One connection's handshake, for an export whose reads are answered by structured replies.
#[derive(Debug)]
pub struct Handshake {
    export: String,
    tls: bool,
    phase: Phase,
    size: Option<u64>,
}

impl Handshake {
    #[must_use]
    pub fn new(export: &str, tls: bool) -> Self {
        Self { export: export.to_owned(), tls, phase: Phase::Greeting, size: None }
    }

    /// Goes on with what the server has sent.
    ///
    /// # Errors
    /// The server does not speak the protocol, has no such export, or refuses.
    pub fn next(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> Result<Next, Violation> {
        if self.phase == Phase::Greeting {
            if input.len() < 18 {
                return Ok(Next::More);
            }
            self.greeted(input, output)?;
        }
        while let Some((kind, data)) = take(input)? {
            if let Some(next) = self.answered(kind, &data, output)? {
                return Ok(next);
            }
        }
        Ok(Next::More)
    }

    fn greeted(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> Result<(), Violation> {
        expect("a greeting", input.get_u64(), GREETING_MAGIC)?;
        expect("a greeting", input.get_u64(), OPTION_MAGIC)?;
        let flags = input.get_u16();
        if flags & greeting::FIXED_NEWSTYLE == 0 {
            return Err(Violation::Nonsense("the server does not speak fixed newstyle"));
        }
        output.put_u32(u32::from(flags & (greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES)));
        if self.tls {
            self.phase = Phase::Tls;
            put_option(output, option::STARTTLS, &[]);
        } else {
            self.ask_structured(output);
        }
        Ok(())
    }

    fn ask_structured(&mut self, output: &mut BytesMut) {
        self.phase = Phase::Structured;
        put_option(output, option::STRUCTURED_REPLY, &[]);
    }

    /// The connection is encrypted from now on: send the output, and go on with `next`.
    pub fn encrypted(&mut self, output: &mut BytesMut) {
        self.ask_structured(output);
    }

    fn answered(&mut self, kind: u32, data: &[u8], output: &mut BytesMut) -> Result<Option<Next>, Violation> {
        if kind & answer::ERROR != 0 {
            let said = String::from_utf8_lossy(data);
            return Err(Violation::Refused(format!("the server refuses ({:?}): {kind:#x} {said}", self.phase)));
        }
        match (self.phase, kind) {
            (Phase::Tls, answer::ACK) => Ok(Some(Next::StartTls)),
            (Phase::Structured, answer::ACK) => {
                self.phase = Phase::Go;
                let mut data = BytesMut::new();
                data.put_u32(u32::try_from(self.export.len()).unwrap_or(u32::MAX));
                data.put_slice(self.export.as_bytes());
                data.put_u16(0);
                put_option(output, option::GO, &data);
                Ok(None)
            }
            (Phase::Go, answer::INFO) => {
                let mut data = data;
                if data.len() >= 10 && data.get_u16() == info::EXPORT {
                    self.size = Some(data.get_u64());
                }
                Ok(None)
            }
            (Phase::Go, answer::ACK) => {
                let size = self.size.ok_or(Violation::Nonsense("the server does not tell the size"))?;
                Ok(Some(Next::Ready(size)))
            }
            _ => Err(Violation::Nonsense("an answer that nothing was asked for")),
        }
    }
}

fn take(input: &mut BytesMut) -> Result<Option<(u32, BytesMut)>, Violation> {
    const HEADER: usize = 20;
    if input.len() < HEADER {
        return Ok(None);
    }
    let mut header = &input[..HEADER];
    expect("an answer", header.get_u64(), OPTION_REPLY_MAGIC)?;
    let (_option, kind, length) = (header.get_u32(), header.get_u32(), header.get_u32());
    if length > LONGEST_ANSWER {
        return Err(Violation::LongOption(length));
    }
    if input.len() < HEADER + length as usize {
        return Ok(None);
    }
    input.advance(HEADER);
    Ok(Some((kind, input.split_to(length as usize))))
}

fn put_option(output: &mut BytesMut, kind: u32, data: &[u8]) {
    output.put_u64(OPTION_MAGIC);
    output.put_u32(kind);
    output.put_u32(u32::try_from(data.len()).unwrap_or(u32::MAX));
    output.put_slice(data);
}

/// The header of a part of an answer; `length` bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub last: bool,
    pub kind: u16,
    pub cookie: u64,
    pub length: u32,
}

impl Part {
    pub const LENGTH: usize = 20;

    /// Takes the next header off `input`; none if it is not there yet.
    ///
    /// # Errors
    /// What is there is no header.
    pub fn take(input: &mut BytesMut) -> Result<Option<Self>, Violation> {
        if input.len() < Self::LENGTH {
            return Ok(None);
        }
        expect("a part of an answer", input.get_u32().into(), CHUNK_MAGIC.into())?;
        let flags = input.get_u16();
        Ok(Some(Self {
            last: flags & chunk::DONE != 0,
            kind: input.get_u16(),
            cookie: input.get_u64(),
            length: input.get_u32(),
        }))
    }
}
