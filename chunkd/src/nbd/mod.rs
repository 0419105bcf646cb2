//! The NBD protocol without I/O: what goes over the wire, and both sides of the handshake as state machines.
//!
//! Source: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>. Spoken here: fixed newstyle negotiation,
//! `STARTTLS`, structured replies, the metadata context `base:allocation`, several connections to one export.

pub mod client;
pub mod server;
#[cfg(test)]
mod tests;

use bytes::{Buf, BufMut, BytesMut};
use thiserror::Error;

pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943; // NBDMAGIC
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // IHAVEOPT
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Bits of the first two words that server and client send.
pub mod greeting {
    pub const FIXED_NEWSTYLE: u16 = 1;
    pub const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR | 1;
    pub const ERR_POLICY: u32 = ERROR | 2;
    pub const ERR_INVALID: u32 = ERROR | 3;
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
}

/// What `INFO` and `GO` tell.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Bits that say what an export can do.
pub mod transmission {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
}

/// What every export here can do.
pub const EXPORT_FLAGS: u16 = transmission::HAS_FLAGS
    | transmission::READ_ONLY
    | transmission::SEND_FLUSH
    | transmission::SEND_DF
    | transmission::CAN_MULTI_CONN
    | transmission::SEND_CACHE;

/// Kinds of requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;

    /// Flag of a block status request: tell one extent only.
    pub const REQ_ONE: u16 = 1 << 3;

    /// Flag of a read, between hosts: nobody waits for it. The protocol gives this bit no meaning.
    pub const PATIENT: u16 = 1 << 15;
}

/// Types of the parts of a structured reply.
pub mod chunk {
    pub const DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 1 << 15;
    pub const PLAIN_ERROR: u16 = ERROR | 1;
}

/// Bits of an extent in the context `base:allocation`.
pub mod extent {
    pub const DATA: u32 = 0;
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 2;
}

/// The metadata context that an export has, and its number on each connection.
pub const ALLOCATION: &str = "base:allocation";
pub const ALLOCATION_ID: u32 = 1;

/// The longest read that the protocol lets a client ask of any server.
pub const MOST_READ: u32 = 32 << 20;

/// Bytes of a name, by the protocol.
pub const LONGEST_NAME: usize = 4096;

/// Errors that requests get: Linux's numbers, which are the protocol's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    Overflow = 75,
    Shutdown = 108,
}

/// The peer does not speak the protocol, or says what makes no sense: the connection has to end.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Violation {
    #[error("{what}: {found:#x} in the place of {wanted:#x}")]
    Magic { what: &'static str, found: u64, wanted: u64 },
    #[error("an option of {0} bytes is too long")]
    LongOption(u32),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Nonsense(&'static str),
}

pub(crate) fn expect(what: &'static str, found: u64, wanted: u64) -> Result<(), Violation> {
    if found == wanted { Ok(()) } else { Err(Violation::Magic { what, found, wanted }) }
}

/// One request of a client. `offset` and `length` in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
}

impl Request {
    pub const LENGTH: usize = 28;

    /// Takes the next request off `input`; none if its header is not there yet. The data of a write stays in `input`.
    ///
    /// # Errors
    /// What is there is no request.
    pub fn take(input: &mut BytesMut) -> Result<Option<Self>, Violation> {
        if input.len() < Self::LENGTH {
            return Ok(None);
        }
        expect("a request", input.get_u32().into(), REQUEST_MAGIC.into())?;
        Ok(Some(Self {
            flags: input.get_u16(),
            kind: input.get_u16(),
            cookie: input.get_u64(),
            offset: input.get_u64(),
            length: input.get_u32(),
        }))
    }

    pub fn put(&self, output: &mut BytesMut) {
        output.put_u32(REQUEST_MAGIC);
        output.put_u16(self.flags);
        output.put_u16(self.kind);
        output.put_u64(self.cookie);
        output.put_u64(self.offset);
        output.put_u32(self.length);
    }

    #[must_use]
    pub fn is_patient(&self) -> bool {
        self.flags & command::PATIENT != 0
    }

    /// The range as bytes from the beginning, if the export has all of it.
    #[must_use]
    pub fn range(&self, size: u64) -> Option<std::ops::Range<u64>> {
        let end = self.offset.checked_add(self.length.into())?;
        (self.length > 0 && end <= size).then_some(self.offset..end)
    }
}

/// A part of an export, in bytes, with its bits of `extent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub length: u32,
    pub bits: u32,
}

/// Zeros are left out of a sparse answer in units of so many bytes.
const HOLE: usize = 512;

fn is_zero(part: &[u8]) -> bool {
    part.iter().all(|&byte| byte == 0)
}

/// How answers are written: as the client has asked for in the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replies {
    pub structured: bool,
    pub allocation: bool,
}

impl Replies {
    /// The header of an answer to a read, which `length` bytes of data follow: the whole answer.
    pub fn data(self, output: &mut BytesMut, request: &Request) {
        if self.structured {
            self.chunk(output, chunk::DONE, chunk::OFFSET_DATA, request.cookie, 8 + request.length);
            output.put_u64(request.offset);
        } else {
            output.put_u32(SIMPLE_REPLY_MAGIC);
            output.put_u32(0);
            output.put_u64(request.cookie);
        }
    }

    /// The whole answer to a read, without zeros: for a client that knows structured replies.
    pub fn sparse(self, output: &mut BytesMut, request: &Request, data: &[u8]) {
        let (mut rest, mut offset) = (data, request.offset);
        while !rest.is_empty() {
            let is_hole = rest.chunks(HOLE).next().is_some_and(is_zero);
            let length = rest.chunks(HOLE).take_while(|part| is_zero(part) == is_hole).map(<[u8]>::len).sum();
            let (part, after) = rest.split_at(length);
            rest = after;
            let (flags, length) =
                (if rest.is_empty() { chunk::DONE } else { 0 }, u32::try_from(length).unwrap_or(u32::MAX));
            if is_hole {
                self.chunk(output, flags, chunk::OFFSET_HOLE, request.cookie, 12);
                output.put_u64(offset);
                output.put_u32(length);
            } else {
                self.chunk(output, flags, chunk::OFFSET_DATA, request.cookie, 8 + length);
                output.put_u64(offset);
                output.put_slice(part);
            }
            offset += u64::from(length);
        }
    }

    /// An answer without data.
    pub fn done(self, output: &mut BytesMut, cookie: u64) {
        if self.structured {
            self.chunk(output, chunk::DONE, chunk::NONE, cookie, 0);
        } else {
            output.put_u32(SIMPLE_REPLY_MAGIC);
            output.put_u32(0);
            output.put_u64(cookie);
        }
    }

    pub fn error(self, output: &mut BytesMut, cookie: u64, error: Errno) {
        if self.structured {
            self.chunk(output, chunk::DONE, chunk::PLAIN_ERROR, cookie, 6);
            output.put_u32(error as u32);
            output.put_u16(0);
        } else {
            output.put_u32(SIMPLE_REPLY_MAGIC);
            output.put_u32(error as u32);
            output.put_u64(cookie);
        }
    }

    /// What the context `base:allocation` says of a range, from its beginning on.
    pub fn extents(self, output: &mut BytesMut, cookie: u64, extents: &[Extent]) {
        let length = 4 + 8 * u32::try_from(extents.len()).unwrap_or(u32::MAX);
        self.chunk(output, chunk::DONE, chunk::BLOCK_STATUS, cookie, length);
        output.put_u32(ALLOCATION_ID);
        for each in extents {
            output.put_u32(each.length);
            output.put_u32(each.bits);
        }
    }

    #[allow(clippy::unused_self)] // all replies are written through this type
    fn chunk(self, output: &mut BytesMut, flags: u16, kind: u16, cookie: u64, length: u32) {
        output.put_u32(CHUNK_MAGIC);
        output.put_u16(flags);
        output.put_u16(kind);
        output.put_u64(cookie);
        output.put_u32(length);
    }
}
