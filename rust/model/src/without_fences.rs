// SPDX-License-Identifier: GPL-2.0

//! The module's side of rings, as it would be without its fences.

#![forbid(unsafe_code)]

mod atomic {
    pub(crate) use crate::engine::{AtomicU32, Ordering};
    pub(crate) fn fence(_: Ordering) {}
}

#[allow(dead_code, clippy::duplicate_mod)]
#[path = "../../queue/order.rs"]
pub(crate) mod order;
