// SPDX-License-Identifier: GPL-2.0

//! The MetaRoCE transport, without I/O: events go in, actions come out.
//!
//! Nothing in this folder reads a clock, takes a lock, allocates while packets move, or
//! sees a payload byte. PROTOCOL.md beside this file specifies the format and the rules.
//!
//! | module | what |
//! | --- | --- |
//! | [`api`] | the seam to the driver: events, actions, the host's callbacks |
//! | [`wire`] | bytes to headers and back; the only place that knows the format |
//! | [`connection`] | endpoint pair: handshake, spraying, acknowledgement, timers |
//! | [`directory`] | the connections of a device, by id and by ends |
//! | [`path`] | one path: numbers sent and received, loss, health |
//! | [`recovery`] | round-trip times and margins |
//! | [`congestion`] | windows, pacing, the receiver's shares |
//! | [`stream`] | queue pair: messages, ordering, placement, RNR, READ and atomics |

#![forbid(unsafe_code)]

pub mod api;
pub mod congestion;
pub mod connection;
pub mod directory;
#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod pair;
pub mod path;
pub mod recovery;
pub mod stream;
pub mod wire;
