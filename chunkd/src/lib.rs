//! The chunk store of `VirtMan`.
//!
//! `listen` accepts clients, `serve` answers them, `image` knows where chunks are, `pool` keeps them, `fetch` reads them from
//! parents, `manifest` proves them, `limits` bounds the traffic. `loops` are the threads of all connections. `nbd` and `tls` are
//! what goes over the wire, and `control` is how the agent tells all this.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a length in memory has 64 bits");

mod alive;
mod busypoll;
pub mod control;
pub mod fetch;
pub mod image;
pub mod kept;
pub mod limits;
pub mod listen;
pub mod loops;
pub mod manifest;
pub mod nbd;
mod nowait;
pub mod pool;
pub mod registry;
pub mod send;
pub mod serve;
pub mod tickets;
pub mod tls;
