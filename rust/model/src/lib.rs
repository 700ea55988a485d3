// SPDX-License-Identifier: GPL-2.0

//! Model checks. `engine` explores programs of a few threads; the other modules are such programs:
//! `rings` runs the kernel's and the plugin's own ring code against each other, `connection` the
//! rules of drive.rs and of the module's work items. Each is also tried with a line left out, which
//! has to be noticed.

#![forbid(unsafe_code)]

pub mod engine;

#[cfg(test)]
mod connection;
#[cfg(test)]
mod rings;
#[cfg(test)]
mod stand_in;
#[cfg(test)]
use stand_in::{abi, bindings, errno, ring};

/// No execution fails.
#[cfg(test)]
fn holds(what: &str, report: &engine::Report) {
    println!("{what}: {} executions", report.executions);
    assert!(report.failure.is_none(), "{:?}", report.failure);
}

/// Some execution does: the check notices what was left out.
#[cfg(test)]
fn fails(what: &str, report: &engine::Report) {
    println!("{what}: found after {} executions", report.executions);
    assert!(report.failure.is_some(), "nobody noticed");
}

/// The plugin's atomics, and the module's.
#[cfg(test)]
mod atomic {
    pub(crate) use crate::engine::{fence, AtomicU32, Ordering};
}

/// The plugin's queues (formatted where they are at home; not all of their functions are modelled).
#[cfg(test)]
#[rustfmt::skip]
#[allow(dead_code)]
#[path = "../../../rdma-provider/src/queue/completion.rs"]
mod completion;
#[cfg(test)]
#[rustfmt::skip]
#[allow(dead_code)]
#[path = "../../../rdma-provider/src/queue/recv.rs"]
mod recv;

/// The module's side.
#[cfg(test)]
#[path = "../../queue/order.rs"]
mod order;
#[cfg(test)]
mod without_fences;
