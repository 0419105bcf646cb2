//! A host that lost its power closes no connection: the kernel has to notice that for both sides.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// An idle connection is asked after IDLE, then every INTERVAL, and ends after PROBES without an answer (tcp(7)).
const IDLE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// How long sent data may stay without an acknowledgement, in milliseconds.
const UNHEARD: u32 = 25_000;

/// Ends a connection whose peer is gone, and sends each answer at once.
pub fn watch(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, UNHEARD)?;
    Ok(())
}
