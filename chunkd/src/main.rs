//! The chunk store of `VirtMan`: one process per host that keeps, verifies and serves the chunks of images.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use tokio::net::TcpListener;
use tokio::runtime;

use chunkd::pool::Pool;
use chunkd::registry::Registry;
use chunkd::{control, listen};

/// Keeps, verifies and serves the chunks of images.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Folder of what outlives this process.
    #[arg(long)]
    state: PathBuf,
    /// Unix socket of the agent.
    #[arg(long)]
    control: PathBuf,
    /// Unix socket of this host's VMs.
    #[arg(long)]
    vms: PathBuf,
    /// Where other hosts read.
    #[arg(long)]
    listen: SocketAddr,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    tracing_subscriber::fmt().with_writer(io::stderr).with_env_filter("info").init();
    let runtime = runtime::Builder::new_multi_thread().enable_all().build()?;
    let manifests = options.state.join("manifests");
    std::fs::create_dir_all(&manifests)?;
    let registry = Arc::new(Registry::new(manifests, Arc::new(Pool::default())));
    let (control, vms) = (bind(&options.control)?, bind(&options.vms)?);
    vms.set_nonblocking(true)?;
    let tls = listen::tls_of(&registry)?;
    let hosts = runtime.block_on(TcpListener::bind(options.listen))?;
    let entered = runtime.enter();
    runtime.spawn(listen::serve_vms(tokio::net::UnixListener::from_std(vms)?, registry.clone()));
    drop(entered);
    runtime.spawn(listen::serve_hosts(hosts, tls, registry.clone()));
    control::listen(&control, &registry, runtime.handle())?;
    Ok(())
}

/// Listens at a path, in the place of a process that has ended.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if path.exists() {
        std::fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}
