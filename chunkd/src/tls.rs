//! TLS 1.3 with pre-shared keys: both sides prove that they know the key of an identity, and there are no certificates.
//!
//! QEMU (`tls-creds-psk`), nbdkit, libnbd (`--tls-psk`) and OpenSSL speak it. The key is the only way in: a server without a
//! certificate cannot offer another one, and a client believes no certificate.

use std::fmt;
use std::pin::Pin;
use std::str::from_utf8;
use std::sync::LazyLock;

use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{
    Error, Ssl, SslContext, SslContextBuilder, SslMethod, SslOptions, SslRef, SslSessionCacheMode, SslVerifyMode,
    SslVersion,
};
use tokio::io::BufStream;
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

/// OpenSSL's callbacks for keys work with suites of SHA-256 alone (`SSL_CTX_set_psk_client_callback(3)`).
const SUITES: &str = "TLS_AES_128_GCM_SHA256";

/// OpenSSL reads and writes each record of 16 KiB by itself. A client gets several with one call of the kernel, and a server
/// sends a chunk with one.
const READ_TOGETHER: usize = 128 << 10;
const WRITTEN_TOGETHER: usize = 80 << 10;

/// Requests, in the other direction, are small.
const REQUESTS: usize = 4 << 10;

/// A connection to another host. What is written is sent with `flush`.
pub type Stream = SslStream<BufStream<TcpStream>>;

static IDENTITY: LazyLock<Index<Ssl, String>> = LazyLock::new(|| Ssl::new_ex_index().expect("OpenSSL has memory"));

/// The key of one identity. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(pub [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

fn context(method: SslMethod) -> Result<SslContextBuilder, ErrorStack> {
    let mut context = SslContext::builder(method)?;
    context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
    context.set_ciphersuites(SUITES)?;
    // A session that is resumed would let in who has lost the key.
    context.set_options(SslOptions::NO_TICKET);
    context.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(context)
}

/// What lets in those of whom `find` knows the key, by identity.
///
/// # Errors
/// OpenSSL cannot be set up.
pub fn server(find: impl Fn(&str) -> Option<Key> + Send + Sync + 'static) -> Result<SslContext, ErrorStack> {
    let mut context = context(SslMethod::tls_server())?;
    context.set_num_tickets(0)?;
    context.set_psk_server_callback(move |ssl: &mut SslRef, identity, into| {
        let Some(identity) = identity.and_then(|bytes| from_utf8(bytes).ok()) else { return Ok(0) };
        let Some(key) = find(identity) else { return Ok(0) };
        ssl.set_ex_data(*IDENTITY, identity.to_owned());
        Ok(put(&key.0, into))
    });
    Ok(context.build())
}

/// Waits for a client's handshake. Returns the identity as well.
///
/// # Errors
/// The client does not prove itself, or hangs up.
pub async fn accept(context: &SslContext, stream: TcpStream) -> Result<(Stream, String), Error> {
    let stream = BufStream::with_capacity(REQUESTS, WRITTEN_TOGETHER, stream);
    let mut stream = SslStream::new(Ssl::new(context)?, stream)?;
    Pin::new(&mut stream).accept().await?;
    let identity = stream.ssl().ex_data(*IDENTITY).cloned().unwrap_or_default();
    Ok((stream, identity))
}

/// Connects as `identity`; the server has to know the key as well.
///
/// # Errors
/// The server does not prove itself, or hangs up.
pub async fn connect(stream: TcpStream, identity: &str, key: &Key) -> Result<Stream, Error> {
    let mut context = context(SslMethod::tls_client())?;
    context.set_verify(SslVerifyMode::PEER);
    let (identity, key) = (format!("{identity}\0"), key.clone());
    context.set_psk_client_callback(move |_, _hint, into_identity, into_key| {
        put(identity.as_bytes(), into_identity);
        Ok(put(&key.0, into_key))
    });
    let stream = BufStream::with_capacity(READ_TOGETHER, REQUESTS, stream);
    let mut stream = SslStream::new(Ssl::new(&context.build())?, stream)?;
    Pin::new(&mut stream).connect().await?;
    Ok(stream)
}

/// Copies all or nothing, and returns how much.
fn put(bytes: &[u8], into: &mut [u8]) -> usize {
    let Some(place) = into.get_mut(..bytes.len()) else { return 0 };
    place.copy_from_slice(bytes);
    bytes.len()
}

#[cfg(test)]
mod tests {
    use openssl::asn1::Asn1Time;
    use openssl::hash::MessageDigest;
    use openssl::pkey::PKey;
    use openssl::rsa::Rsa;
    use openssl::x509::{X509, X509Name};
    use tokio::net::TcpListener;

    use super::*;

    /// What a client of one key says of a server.
    async fn connects_to(server: SslContext) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let accepting =
            tokio::spawn(async move { accept(&server, listener.accept().await.unwrap().0).await.map(drop) });
        let connected = connect(stream, "image/one/1", &Key([7; 32])).await.is_ok();
        let _ = accepting.await;
        connected
    }

    fn of_certificate() -> SslContext {
        let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
        let mut name = X509Name::builder().unwrap();
        name.append_entry_by_text("CN", "localhost").unwrap();
        let name = name.build();
        let mut certificate = X509::builder().unwrap();
        certificate.set_subject_name(&name).unwrap();
        certificate.set_issuer_name(&name).unwrap();
        certificate.set_pubkey(&key).unwrap();
        certificate.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
        certificate.set_not_after(&Asn1Time::days_from_now(1).unwrap()).unwrap();
        certificate.sign(&key, MessageDigest::sha256()).unwrap();
        let mut context = SslContext::builder(SslMethod::tls_server()).unwrap();
        context.set_certificate(&certificate.build()).unwrap();
        context.set_private_key(&key).unwrap();
        context.build()
    }

    #[tokio::test]
    async fn a_client_believes_a_key_and_no_certificate() {
        assert!(connects_to(server(|_| Some(Key([7; 32]))).unwrap()).await);
        assert!(!connects_to(server(|_| Some(Key([8; 32]))).unwrap()).await);
        assert!(!connects_to(server(|_| None).unwrap()).await);
        assert!(!connects_to(of_certificate()).await);
    }
}
