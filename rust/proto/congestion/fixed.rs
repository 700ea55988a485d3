// SPDX-License-Identifier: GPL-2.0

//! A window that never changes. It shows what the other parts of the transport do by
//! themselves, and serves where nobody else uses the network.

#![forbid(unsafe_code)]

use super::{Context, Delivery, Law};
use crate::proto::api::Time;

/// Full packets that a path may have in flight.
pub(super) const PACKETS: u32 = 16;

/// See the top of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed {
    bytes: u32,
}

impl Fixed {
    /// The window for full packets of `packet` bytes.
    pub(super) fn new(packet: u32) -> Self {
        Self {
            bytes: packet.saturating_mul(PACKETS).max(super::FLOOR),
        }
    }
}

impl Law for Fixed {
    fn bytes(&self) -> u32 {
        self.bytes
    }

    fn acked(&mut self, _: u32, _: u32, _: &Context) {}

    fn queue(&mut self) {}

    fn marked(&mut self, _: Time, _: u32, _: Time) -> bool {
        false
    }

    fn lost_in_queue(&mut self, _: Time, _: Time, _: u32) -> bool {
        false
    }

    fn undo(&mut self) {}

    fn lost(&mut self, _: u32) {}

    fn round(&mut self, _: Time, _: Time, _: Time, _: &Delivery, _: &Context) {}
}
