// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The queues: checks at post time, work queue elements, completions.
//!
//! Index ownership, as `metaroce-abi.h` states it: this side owns the producer of SQ, RQ and SRQ
//! and the consumer of a CQ. It keeps private copies of them and never reads them back from the
//! ring, except after a reset, when the kernel says where both sides go on.

mod completion;
mod recv;
mod send;

pub(crate) use completion::CompletionQueue;
pub(crate) use recv::RecvQueue;
pub(crate) use send::{Limits, Request, SendQueue, KEEP_FLAGS};

use crate::errno::{Errno, EINVAL};
use crate::ffi::sys;

/// May the send queue of a queue pair in `state` be posted to? In RESET, INIT and RTR this is an
/// error; in SQE and ERR the kernel flushes what is posted.
pub(crate) fn may_send(state: u32) -> Result<(), Errno> {
    match state {
        sys::IBV_QPS_RTS | sys::IBV_QPS_SQD | sys::IBV_QPS_SQE | sys::IBV_QPS_ERR => Ok(()),
        _ => Err(EINVAL),
    }
}

/// May the receive queue of a queue pair in `state` be posted to? In every state but RESET.
pub(crate) fn may_receive(state: u32) -> Result<(), Errno> {
    match state {
        sys::IBV_QPS_RESET | sys::IBV_QPS_UNKNOWN => Err(EINVAL),
        _ => Ok(()),
    }
}
