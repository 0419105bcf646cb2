//! How the agent tells this process what to do: a line of JSON for each call and each answer, over a unix socket.
//!
//! Each call is idempotent, so an agent that starts says all again. A file that a call is about comes along as a descriptor
//! (unix(7), `SCM_RIGHTS`). Errors are `{"error": "…"}`, with `"full": true` if the pool has no room.

use std::fs::File;
use std::future::pending;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream as Blocking};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Handle;

use crate::image::Class;
use crate::limits::LimitsSpec;
use crate::registry::{ImageSpec, Refused, Registry, Secret};

/// Bytes of a call: an image with its parents and children.
const LONGEST: usize = 16 << 20;

#[derive(Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case", deny_unknown_fields)]
enum Call {
    Serve(ImageSpec),
    Admit {
        image: String,
        serving_key: Secret,
        revision: u64,
        children: Vec<String>,
        #[serde(default)]
        new: bool,
    },
    Close {
        image: String,
    },
    Drop {
        image: String,
    },
    AddMember {
        path: PathBuf,
        limit: u64,
        #[serde(default)]
        reserve: u64,
        #[serde(default)]
        make: bool,
    },
    RemoveMember {
        path: PathBuf,
    },
    Fill {
        image: String,
        ranges: Vec<(u64, u64)>,
        #[serde(default)]
        idle: bool,
        /// Bytes a second.
        #[serde(default)]
        rate: Option<NonZeroU64>,
    },
    Put {
        image: String,
        ranges: Vec<(u64, u64)>,
    },
    Get {
        image: String,
        ranges: Vec<(u64, u64)>,
    },
    Lacking {
        image: String,
    },
    BootSet {
        image: String,
    },
    Pin {
        key: String,
        until: u64,
    },
    Limits(LimitsSpec),
    Kept,
    Held {
        key: String,
        #[serde(default)]
        alone: bool,
    },
    Forget {
        key: String,
    },
    Status {
        #[serde(default)]
        image: Option<String>,
    },
    Events,
}

/// Serves agents, one thread each, without an end. `address`: where other hosts connect.
///
/// # Errors
/// Nobody can be accepted.
pub fn listen(
    listener: &UnixListener,
    registry: &Arc<Registry>,
    runtime: &Handle,
    address: SocketAddr,
) -> io::Result<()> {
    for stream in listener.incoming() {
        let (stream, registry, runtime) = (stream?, registry.clone(), runtime.clone());
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            let agent = Agent { stream, registry, runtime, address, input: Vec::new(), file: None };
            if let Err(error) = agent.serve() {
                tracing::debug!(%error, "a control connection ends");
            }
        })?;
    }
    Ok(())
}

/// As the agent knows ranges: where each begins and ends.
fn pairs(ranges: &[Range<u64>]) -> Vec<(u64, u64)> {
    ranges.iter().map(|range| (range.start, range.end)).collect()
}

fn ranges_of(pairs: &[(u64, u64)]) -> Vec<Range<u64>> {
    pairs.iter().map(|&(begin, end)| begin..end).collect()
}

struct Agent {
    stream: Blocking,
    registry: Arc<Registry>,
    runtime: Handle,
    address: SocketAddr,
    input: Vec<u8>,
    file: Option<OwnedFd>,
}

impl Agent {
    fn serve(mut self) -> io::Result<()> {
        while let Some(line) = self.line()? {
            let file = self.file.take().map(File::from);
            let answer = match serde_json::from_slice(&line) {
                Ok(Call::Events) => return self.tell(),
                Ok(call) => self.call(call, file).unwrap_or_else(
                    |error| json!({ "error": error.to_string(), "full": matches!(error, Refused::Full) }),
                ),
                Err(error) => json!({ "error": format!("no call: {error}") }),
            };
            self.say(&answer)?;
        }
        Ok(())
    }

    fn call(&self, call: Call, file: Option<File>) -> Result<Value, Refused> {
        match call {
            Call::Serve(spec) => self.runtime.block_on(self.registry.serve(spec, file))?,
            Call::Admit { image, serving_key, revision, children, new } => {
                self.registry.admit(&image, serving_key, revision, children, new);
            }
            Call::Close { image } => self.registry.close(&image),
            Call::Drop { image } => self.registry.drop_image(&image),
            Call::AddMember { path, limit, reserve, make } => self.registry.pool.add(&path, limit, reserve, make)?,
            Call::RemoveMember { path } => return Ok(json!({ "removed": self.registry.pool.remove(&path) })),
            Call::Fill { image, ranges, idle, rate } => {
                let _entered = self.runtime.enter();
                let class = if idle { Class::Idle } else { Class::Soon };
                self.registry.fill(&image, ranges_of(&ranges), class, rate)?;
            }
            Call::Put { image, ranges } => {
                let mut file = file.ok_or_else(|| Refused::Invalid("a put needs a file".to_owned()))?;
                let taken = self.registry.served(&image)?.put(&ranges_of(&ranges), &mut file, &self.runtime)?;
                return Ok(json!({ "kept": taken.kept, "wrong": pairs(&taken.wrong), "full": taken.full }));
            }
            Call::Get { image, ranges } => {
                let file = file.ok_or_else(|| Refused::Invalid("a get needs a file".to_owned()))?;
                let image = self.registry.served(&image)?;
                self.unless_hung_up(image.get(&ranges_of(&ranges), file))??;
            }
            Call::Lacking { image } => {
                let image = self.registry.served(&image)?;
                let lacking = self.unless_hung_up(image.lacking())?.map_err(io::Error::other)?;
                return Ok(json!({ "ranges": pairs(&lacking) }));
            }
            Call::BootSet { image } => {
                return Ok(json!({ "ranges": self.registry.boot_set(&image)?.as_deref().map(pairs) }));
            }
            Call::Pin { key, until } => self.registry.pin(&key, until)?,
            Call::Limits(spec) => self.registry.limits.set(&spec),
            Call::Kept => {
                let keys = self.registry.kept()?.into_iter().map(|kept| kept.key);
                return Ok(json!({ "keys": keys.collect::<Vec<_>>() }));
            }
            Call::Held { key, alone } => return Ok(json!({ "bytes": self.registry.held(&key, alone)? })),
            Call::Forget { key } => return Ok(json!({ "bytes": self.registry.forget(&key)? })),
            Call::Status { image } => {
                let (held, limit) = self.registry.pool.usage();
                let images = self.registry.status(image.as_deref());
                let limits = self.registry.limits.get();
                return Ok(json!({
                    "version": env!("CARGO_PKG_VERSION"), "images": images, "held": held, "limit": limit,
                    "address": self.address, "limits": limits,
                }));
            }
            Call::Events => {} // see `serve`
        }
        Ok(json!({}))
    }

    /// Does what may take long, until the agent hangs up: then nobody wants it any more.
    fn unless_hung_up<T>(&self, act: impl Future<Output = T>) -> io::Result<T> {
        let agent = self.stream.try_clone()?;
        agent.set_nonblocking(true)?;
        let ended = self.runtime.block_on(async {
            let agent = UnixStream::from_std(agent)?;
            let hung_up = async {
                match agent.ready(Interest::READABLE).await {
                    Ok(ready) if !ready.is_read_closed() => pending().await, // its next call may be here
                    heard => heard.map(|_| ()),
                }
            };
            tokio::select! {
                done = act => Ok(done),
                ended = hung_up => Err(ended.err().unwrap_or_else(|| io::ErrorKind::ConnectionAborted.into())),
            }
        });
        self.stream.set_nonblocking(false)?; // both descriptors have the flag
        ended
    }

    /// Tells events until the agent hangs up.
    fn tell(&mut self) -> io::Result<()> {
        let mut events = self.registry.events();
        self.say(&json!({}))?;
        loop {
            match self.runtime.block_on(events.recv()) {
                Ok(event) => self.say(&event)?,
                Err(error) => return Err(io::Error::other(error)), // too slow: the agent looks for itself again
            }
        }
    }

    fn say(&mut self, answer: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }

    /// The next line; none at the end. A descriptor that came with it is in `file`.
    fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.input.iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.input.drain(..=end).collect();
                line.pop();
                return Ok(Some(line));
            }
            if self.input.len() > LONGEST {
                return Err(io::Error::other("a call is too long"));
            }
            if !self.receive()? {
                return Ok(None);
            }
        }
    }

    fn receive(&mut self) -> io::Result<bool> {
        let mut part = vec![0; 64 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            &self.stream,
            &mut [io::IoSliceMut::new(&mut part)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.file = files.last();
            }
        }
        self.input.extend_from_slice(&part[..received.bytes]);
        Ok(received.bytes > 0)
    }
}
