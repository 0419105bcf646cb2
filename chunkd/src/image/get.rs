//! Ranges of an image for a file or a pipe of the agent, so that they travel another way than to a child.

use std::fs::File;
use std::future::pending;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use tokio::io::Interest;
use tokio::net::unix::pipe;
use tokio::task::yield_now;

use super::fill::pieces;
use super::{Failed, Image};
use crate::fetch::Closed;
use crate::manifest::{is_zero, to_usize};

/// Pieces of 256 KiB that are read ahead of what is written.
const AHEAD: usize = 8;

impl Image {
    /// Writes ranges of the image, one after the other, to where a file is, or into a pipe. A file is written by this thread.
    ///
    /// What is not here is read from parents. Zeros beyond the end of a file become a hole.
    ///
    /// # Errors
    /// A range is empty or not within the image, nobody reads the pipe any more, the file cannot be written, the image is
    /// dropped, or its origin's own disk fails.
    pub async fn get(self: &Arc<Self>, ranges: &[Range<u64>], to: File) -> io::Result<()> {
        if ranges.iter().any(|range| range.is_empty() || range.end > self.size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a range has to be within the image, and not empty",
            ));
        }
        let output = Output::of(to)?;
        tokio::select! {
            () = self.closed.cancelled() => Err(io::Error::other(Closed)),
            error = output.lost() => Err(error),
            written = self.write(ranges, &output) => written,
        }
    }

    async fn write(self: &Arc<Self>, ranges: &[Range<u64>], output: &Output) -> io::Result<()> {
        let pieces = stream::iter(ranges.iter().cloned().flat_map(pieces));
        let mut reads = pieces.map(|piece| self.read_piece(piece)).buffered(AHEAD);
        while let Some(data) = reads.next().await {
            output.write(&data.map_err(io::Error::other)?).await?;
            yield_now().await; // where nothing waits, the end of the image or of the reader is noticed here
        }
        Ok(())
    }

    async fn read_piece(self: &Arc<Self>, piece: Range<u64>) -> Result<Bytes, Failed> {
        let length = piece.end - piece.start;
        let mut data = BytesMut::zeroed(to_usize(length));
        if self.read_now(piece.start, &mut data) {
            return Ok(data.freeze());
        }
        drop(data);
        self.read(piece.start, u32::try_from(length).unwrap_or(u32::MAX), false).await
    }
}

/// Where ranges go.
enum Output {
    Pipe(pipe::Sender),
    File(File),
}

impl Output {
    /// A pipe is opened anew (proc(5)): the descriptor that came is still the agent's as well, who may want it to block.
    fn of(file: File) -> io::Result<Self> {
        if !file.metadata()?.file_type().is_fifo() {
            return Ok(Self::File(file));
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        pipe::OpenOptions::new().open_sender(path).map(Self::Pipe)
    }

    /// Returns when nobody reads the pipe any more, also while there is nothing to write.
    async fn lost(&self) -> io::Error {
        match self {
            Self::Pipe(pipe) => pipe.ready(Interest::ERROR).await.err().unwrap_or(io::ErrorKind::BrokenPipe.into()),
            Self::File(_) => pending().await,
        }
    }

    async fn write(&self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => write_pipe(pipe, data).await,
            Self::File(file) => write_file(file, data),
        }
    }
}

async fn write_pipe(pipe: &pipe::Sender, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        pipe.writable().await?;
        match pipe.try_write(data) {
            Ok(written) => data = &data[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_file(mut file: &File, data: &[u8]) -> io::Result<()> {
    let known = file.metadata()?;
    if !known.is_file() || !is_zero(data) || file.stream_position()? < known.len() {
        return file.write_all(data);
    }
    let end = file.stream_position()? + data.len() as u64;
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end)).map(|_| ())
}
