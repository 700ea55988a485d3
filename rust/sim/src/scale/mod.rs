// SPDX-License-Identifier: GPL-2.0

//! Many hosts and fast links: the real core on every endpoint, switches with finite buffers,
//! and models of other transports to compare with. See README.md beside the sources.

#![forbid(unsafe_code)]

mod agree;
mod endpoint;
mod fabric;
mod font;
mod model;
mod net;
mod packet;
mod png;
mod queue;
mod report;
mod spec;
mod text;
mod traffic;
mod world;

pub use report::{main, run_file, Options, Row};
