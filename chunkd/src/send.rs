//! Sends what was put together.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Sends all of the output, which is empty then. A connection to another host has a buffer, so writing alone sends nothing.
///
/// # Errors
/// The connection ends.
pub async fn send<S: AsyncWrite + Unpin>(stream: &mut S, output: &mut BytesMut) -> io::Result<()> {
    stream.write_all(output).await?;
    output.clear();
    stream.flush().await
}
