//! The chunk store of `VirtMan`: one process per host that keeps, verifies and serves the chunks of images.

use std::error::Error;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use clap::Parser;
use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::{self, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use chunkd::loops::Loops;
use chunkd::pool::Pool;
use chunkd::registry::Registry;
use chunkd::{control, listen};

/// How often the pool looks whether pins have ended, and whether a file system needs its reserve.
const TEND_EVERY: Duration = Duration::from_secs(2);

/// Keeps, verifies and serves the chunks of images.
///
/// Sockets that it inherits as systemd hands them over (`sd_listen_fds(3)`) come first: control, VMs, hosts.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Folder of images' manifests.
    #[arg(long)]
    manifests: PathBuf,
    /// Unix socket of the agent.
    #[arg(long)]
    control: PathBuf,
    /// Unix socket of this host's VMs.
    #[arg(long)]
    vms: PathBuf,
    /// Where other hosts read.
    #[arg(long)]
    listen: SocketAddr,
    /// Gets the number of this process, and when it began (proc(5), stat, field 22).
    #[arg(long)]
    pid_file: Option<PathBuf>,
}

/// Where clients come from.
struct Sockets {
    control: UnixListener,
    vms: UnixListener,
    hosts: TcpListener,
}

impl Sockets {
    fn of(options: &Options) -> io::Result<Self> {
        let mut inherited = ListenFd::from_env();
        let sockets = Self {
            control: inherited.take_unix_listener(0)?.map_or_else(|| bind(&options.control), Ok)?,
            vms: inherited.take_unix_listener(1)?.map_or_else(|| bind(&options.vms), Ok)?,
            hosts: inherited.take_tcp_listener(2)?.map_or_else(|| TcpListener::bind(options.listen), Ok)?,
        };
        sockets.control.set_nonblocking(false)?;
        sockets.vms.set_nonblocking(true)?;
        sockets.hosts.set_nonblocking(true)?;
        Ok(sockets)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    dump_no_core()?;
    allow_open_files()?;
    tracing_subscriber::fmt().with_writer(io::stderr).with_env_filter("info").init();
    if let Some(path) = &options.pid_file {
        write_pid(path)?;
    }
    let sockets = Sockets::of(&options)?;
    std::fs::create_dir_all(&options.manifests)?;
    let loops = Loops::start(available_parallelism()?.get())?;
    let registry = Arc::new(Registry::new(options.manifests, Arc::new(Pool::default()), Arc::new(loops)));
    let runtime = runtime::Builder::new_multi_thread().enable_all().build()?;
    let address = sockets.hosts.local_addr()?;
    serve(&runtime, sockets.vms, sockets.hosts, &registry)?;
    control::listen(&sockets.control, &registry, runtime.handle(), address)?;
    Ok(())
}

fn serve(
    runtime: &Runtime,
    vms: UnixListener,
    hosts: TcpListener,
    registry: &Arc<Registry>,
) -> Result<(), Box<dyn Error>> {
    let _entered = runtime.enter();
    runtime.spawn(listen::serve_vms(tokio::net::UnixListener::from_std(vms)?, registry.clone()));
    let tls = listen::tls_of(registry)?;
    runtime.spawn(listen::serve_hosts(tokio::net::TcpListener::from_std(hosts)?, tls, registry.clone()));
    runtime.spawn(tend(registry.clone()));
    Ok(())
}

/// Ends pins, and gives space back to VMs' disks, without an end.
async fn tend(registry: Arc<Registry>) {
    loop {
        sleep(TEND_EVERY).await;
        let registry = registry.clone();
        let tended = spawn_blocking(move || {
            registry.end_pins();
            registry.pool.shrink()
        });
        match tended.await {
            Ok(0) => {}
            Ok(freed) => tracing::info!(freed, "chunks make room for others in their file system"),
            Err(error) => tracing::error!(%error, "the pool does not shrink"),
        }
    }
}

/// Secrets in memory must not get to a disk.
///
/// `PR_SET_DUMPABLE` would do more, but it gives /proc/PID to root (proc(5)): the agent could not recognise its own process.
fn dump_no_core() -> io::Result<()> {
    Ok(setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?)
}

/// Each connection is an open file, and each read of a disk is not: the usual 1024 are for programs that use select(2).
fn allow_open_files() -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Writes the pid file in one step: whoever reads it finds all of it.
fn write_pid(path: &Path) -> io::Result<()> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name of the program comes second, in brackets, and may hold spaces.
    let began = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or_default();
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, format!("{} {began}\n", std::process::id()))?;
    std::fs::rename(fresh, path)
}

/// Listens at a path, in the place of a process that has ended.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if path.exists() {
        std::fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}
