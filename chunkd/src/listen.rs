//! Accepts programs of this host at a unix socket, and other hosts at a TCP port.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use openssl::ssl::SslContext;
use rustix::net::sockopt;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::alive;
use crate::limits::Place;
use crate::nbd::server::{Handshake, Security};
use crate::registry::Registry;
use crate::serve::{self, Agreed, Ended, Export, Exports};
use crate::tls;

/// A host that does not finish the handshakes hangs.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Bytes that may wait in the kernel for a program of this host. Without `CAP_NET_ADMIN`, at most `net.core.wmem_max`.
const SENT_AHEAD: usize = 2 << 20;

/// Serves programs of this host, without an end.
pub async fn serve_vms(listener: UnixListener, registry: Arc<Registry>) {
    loop {
        match listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
            Ok(stream) => {
                registry.loops.next().spawn(log_end("a program of this host", serve_vm(stream, registry.clone())));
            }
            Err(error) => wait_for_room(&error).await,
        }
    }
}

/// Serves other hosts, without an end. `tls`: see `tls_of`.
pub async fn serve_hosts(listener: TcpListener, tls: SslContext, registry: Arc<Registry>) {
    let room = &registry.limits.hosts;
    loop {
        if room.is_full() {
            tracing::warn!("all connections are in use: further hosts wait until one ends");
        }
        room.free().await;
        let accepted = tokio::select! {
            biased; // no host gets in after the limit has sunk
            () = room.full() => continue,
            accepted = listener.accept() => accepted.and_then(|(stream, _)| stream.into_std()),
        };
        match accepted {
            Ok(stream) => {
                let place = Place::take(registry.limits.clone());
                let (tls, registry) = (tls.clone(), registry.clone());
                let event_loop = registry.loops.next();
                event_loop.spawn(async move {
                    log_end("a host", serve_host(stream, tls, registry)).await;
                    drop(place);
                });
            }
            Err(error) => wait_for_room(&error).await,
        }
    }
}

/// Lets in those whom the registry knows.
///
/// # Errors
/// OpenSSL cannot be set up.
pub fn tls_of(registry: &Arc<Registry>) -> Result<SslContext, openssl::error::ErrorStack> {
    let registry = registry.clone();
    tls::server(move |identity| registry.key(identity))
}

/// No descriptor is left: others have to end first.
async fn wait_for_room(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    sleep(Duration::from_millis(100)).await;
}

async fn log_end(who: &str, served: impl Future<Output = Result<(), Ended>>) {
    if let Err(error) = served.await {
        tracing::debug!(who, %error, "a connection ends");
    }
}

async fn serve_vm(stream: std::os::unix::net::UnixStream, registry: Arc<Registry>) -> Result<(), Ended> {
    let mut stream = UnixStream::from_std(stream)?;
    let _ = sockopt::set_socket_send_buffer_size_force(&stream, SENT_AHEAD)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&stream, SENT_AHEAD));
    let mut input = BytesMut::new();
    greet(&mut stream).await?;
    let mut handshake = Handshake::new(Security::Plain);
    match in_time(serve::negotiate(&mut stream, &mut handshake, &mut input, &*registry)).await? {
        Agreed::Serve(export, replies) => {
            serve::serve(stream, input, export, replies, &CancellationToken::new(), None).await
        }
        _ => Ok(()),
    }
}

async fn serve_host(stream: std::net::TcpStream, tls: SslContext, registry: Arc<Registry>) -> Result<(), Ended> {
    let mut plain = TcpStream::from_std(stream)?;
    alive::watch(&plain)?;
    let mut input = BytesMut::new();
    let mut handshake = Handshake::new(Security::Required);
    let (mut stream, identity) = match in_time(async {
        greet(&mut plain).await?;
        serve::negotiate(&mut plain, &mut handshake, &mut input, &Nothing).await
    })
    .await?
    {
        Agreed::StartTls => in_time(async { Ok(tls::accept(&tls, plain).await?) }).await?,
        _ => return Ok(()),
    };
    handshake.encrypted();
    let Some((exports, cut)) = registry.let_in(&identity) else { return Ok(()) };
    let agreed = in_time(serve::negotiate(&mut stream, &mut handshake, &mut input, &exports));
    let Some(agreed) = cut.run_until_cancelled(agreed).await else { return Ok(()) };
    match agreed? {
        Agreed::Serve(export, replies) => {
            serve::serve(stream, input, export, replies, &cut, Some(&registry.limits.up)).await
        }
        _ => Ok(()),
    }
}

async fn greet<S: AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    let mut greeting = BytesMut::new();
    Handshake::greet(&mut greeting);
    stream.write_all(&greeting).await
}

async fn in_time<T>(handshake: impl Future<Output = Result<T, Ended>>) -> Result<T, Ended> {
    timeout(HANDSHAKE_WITHIN, handshake).await.map_err(|_| Ended::Late)?
}

/// What a host finds before it has proven who it is.
struct Nothing;

impl Exports for Nothing {
    fn find(&self, _name: &str) -> Option<Export> {
        None
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn news(&self) -> watch::Receiver<()> {
        watch::Sender::default().subscribe()
    }
}
