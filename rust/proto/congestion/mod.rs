// SPDX-License-Identifier: GPL-2.0

//! Congestion control of the sender: a window per path and the sum of them for the
//! connection; and the receiver's part, the shares of its bandwidth.
//!
//! What a window does is its controller's matter: one file behind `Law`, chosen by name
//! ([`Controller`]). What is the same for all of them stands here: the rate at which a path
//! delivers, what counts as room above its bandwidth-delay product, the window that a share
//! allows. All numbers are integers.

#![forbid(unsafe_code)]

mod aimd;
mod delivery;
mod fixed;
mod pace;
mod share;
#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests;

pub(crate) use self::pace::Pace;
pub use self::share::{Shares, Ticket};

use self::aimd::Aimd;
use self::delivery::Delivery;
use self::fixed::Fixed;
use crate::proto::api::Time;

/// Packets that all paths together may have in flight at first, and bytes at least: short messages
/// do not wait for a round trip.
const INITIAL_PACKETS: u32 = 64;
const INITIAL_BYTES: u32 = 64 << 10;

/// What UDP, IPv4 and Ethernet (with preamble and gap) add to a packet on the line, in bytes:
/// rates are those of lines.
pub(crate) const LINE_OVERHEAD: u32 = 8 + 20 + 38;

/// More lateness than this, in ns, is not made up for by longer queues, and does not explain any.
pub(crate) const LATENESS_MAX: Time = 10_000_000;

/// A window never gets lower. It is less than a packet: a path with an empty network may
/// send one anyway, the sum of the windows limits the connection.
pub(crate) const FLOOR: u32 = 256;

/// Round trips after a signal in which all paths together grow as one.
const CAUTION: u32 = 16;

/// Which controller the windows of a connection have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Controller {
    /// Grows by a packet in a round trip, shrinks with marks and with losses in a queue.
    #[default]
    Aimd,
    /// Never changes: for tests, and for networks that belong to one connection.
    Fixed,
}

impl Controller {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Aimd, Self::Fixed];

    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aimd => "aimd",
            Self::Fixed => "fixed",
        }
    }

    /// It takes no notice of congestion: not for whoever shares a network with others.
    pub const fn is_restricted(self) -> bool {
        matches!(self, Self::Fixed)
    }

    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }
}

/// What a controller does: it is told what becomes of a path's packets, and says how many
/// bytes of them may be in flight.
trait Law {
    /// The window in bytes.
    fn bytes(&self) -> u32;

    /// `bytes` in `packets` packets were acknowledged.
    fn acked(&mut self, bytes: u32, packets: u32, c: &Context);

    /// The round trip shows a queue.
    fn queue(&mut self);

    /// `marked` of the packets that an acknowledgement newly counts were marked; the newest
    /// of them was sent at `sent`. True when the window was cut.
    fn marked(&mut self, now: Time, marked: u32, sent: Time) -> bool;

    /// A packet that was sent at `sent` is lost while a queue stands. `bdp` is what the
    /// path delivers in its least round-trip time. True when the window was cut.
    fn lost_in_queue(&mut self, now: Time, sent: Time, bdp: u32) -> bool;

    /// The latest loss was none.
    fn undo(&mut self);

    /// Losses, whatever their cause.
    fn lost(&mut self, packets: u32);

    /// News of the path have been told. Another round begins when the last one has lasted for
    /// `rtt`; `least` is the least round-trip time.
    fn round(&mut self, now: Time, rtt: Time, least: Time, delivery: &Delivery, c: &Context);
}

/// What a controller needs to know about the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    /// Bytes of a full packet.
    pub(crate) mtu: u32,
    /// Paths over which the connection sprays.
    pub(crate) paths: u32,
    /// Something is waiting to be sent: the windows are what limits.
    pub(crate) limited: bool,
    /// Within [`CAUTION`] round trips of a congestion signal of any path.
    pub(crate) cautious: bool,
    /// The signal was a loss.
    pub(crate) lossy: bool,
    /// Room that the path's window has above its bandwidth-delay product.
    pub(crate) slack: u32,
}

/// The room for one of `paths` paths of a connection to which `rate` bytes per second are
/// delivered: a part of [`INITIAL_PACKETS`], and what passes while a host is late. Round
/// trips that are long because a machine stood still must not look like a queue: the rate
/// that they allow would shrink the windows, and these the rate.
pub(crate) fn slack(rate: u64, paths: u32, mtu: u32, lateness: Time) -> u32 {
    let paths = u64::from(paths);
    let fixed = ratio(u64::from(mtu.saturating_mul(INITIAL_PACKETS)), paths);
    let late = ratio(
        rate.saturating_mul(lateness.min(LATENESS_MAX)) / 1_000_000_000,
        paths,
    );
    u32::try_from(fixed.max(u64::from(mtu)).saturating_add(late)).unwrap_or(u32::MAX)
}

/// The controllers, side by side: a branch costs less than a call through a table.
#[derive(Clone, Copy, Debug)]
enum Laws {
    Aimd(Aimd),
    Fixed(Fixed),
}

/// Calls what the controller at hand does.
macro_rules! law {
    ($laws:expr, $l:ident => $call:expr) => {
        match $laws {
            Laws::Aimd($l) => $call,
            Laws::Fixed($l) => $call,
        }
    };
}

/// Congestion state of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// What the controller says: looked at more often than it changes.
    bytes: u32,
    laws: Laws,
    delivery: Delivery,
}

impl Window {
    /// The window of a path that is not in use yet.
    pub(crate) fn new(controller: Controller) -> Self {
        let laws = match controller {
            Controller::Aimd => Laws::Aimd(Aimd::new(0)),
            Controller::Fixed => Laws::Fixed(Fixed::new(0)),
        };
        Self {
            bytes: law!(&laws, l => l.bytes()),
            laws,
            delivery: Delivery::default(),
        }
    }

    /// The path begins (again) and nothing is known about it: `bytes` may be in flight at
    /// first, full packets have `packet` bytes.
    pub(crate) fn begin(&mut self, bytes: u32, packet: u32) {
        match &mut self.laws {
            Laws::Aimd(l) => *l = Aimd::new(bytes),
            Laws::Fixed(l) => *l = Fixed::new(packet),
        }
        self.bytes = law!(&self.laws, l => l.bytes());
        self.delivery = Delivery::default();
    }

    /// The window in bytes.
    pub(crate) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Delivered bytes per second.
    pub(crate) fn rate(&self) -> u64 {
        self.delivery.rate()
    }

    /// Bytes that the path delivers in `least`.
    pub(crate) fn bdp(&self, least: Time) -> u32 {
        self.delivery.bdp(least)
    }

    /// See [`Law::acked`].
    pub(crate) fn acked(&mut self, bytes: u32, packets: u32, c: &Context) {
        self.delivery.acked(bytes, packets);
        self.bytes = law!(&mut self.laws, l => {
            l.acked(bytes, packets, c);
            l.bytes()
        });
    }

    /// See [`Law::queue`].
    pub(crate) fn queue(&mut self) {
        self.bytes = law!(&mut self.laws, l => {
            l.queue();
            l.bytes()
        });
    }

    /// See [`Law::marked`].
    pub(crate) fn marked(&mut self, now: Time, marked: u32, sent: Time) -> bool {
        let cut;
        (cut, self.bytes) = law!(&mut self.laws, l => (l.marked(now, marked, sent), l.bytes()));
        cut
    }

    /// See [`Law::lost_in_queue`].
    pub(crate) fn lost_in_queue(&mut self, now: Time, sent: Time, bdp: u32) -> bool {
        let cut;
        (cut, self.bytes) = law!(&mut self.laws, l => (l.lost_in_queue(now, sent, bdp), l.bytes()));
        cut
    }

    /// See [`Law::undo`].
    pub(crate) fn undo(&mut self) {
        self.bytes = law!(&mut self.laws, l => {
            l.undo();
            l.bytes()
        });
    }

    /// See [`Law::lost`].
    pub(crate) fn lost(&mut self, packets: u32) {
        self.bytes = law!(&mut self.laws, l => {
            l.lost(packets);
            l.bytes()
        });
    }

    /// Measures the rate; see [`Law::round`]. `least` is the least round-trip time.
    pub(crate) fn round(&mut self, now: Time, rtt: Time, least: Time, c: &Context) {
        self.delivery.measure(now, rtt);
        let delivery = &self.delivery;
        self.bytes = law!(&mut self.laws, l => {
            l.round(now, rtt, least, delivery, c);
            l.bytes()
        });
    }
}

/// A quotient; 0 when the divisor is.
pub(crate) fn ratio(a: u64, b: u64) -> u64 {
    a.checked_div(b).unwrap_or(0)
}

/// The first window of one of `paths` paths, whose full packets carry `payload` bytes and count
/// as `packet`.
pub(crate) fn initial(paths: u32, payload: u32, packet: u32) -> u32 {
    let packets = INITIAL_BYTES.div_ceil(payload.max(1)).max(INITIAL_PACKETS);
    packet.saturating_mul(packets.div_ceil(paths.max(1)))
}

/// For how long growth is cautious after a signal.
pub(crate) fn caution(rtt: Time) -> Time {
    rtt.saturating_mul(u64::from(CAUTION))
}

/// Greatest connection window that a share of `kbit` allows, in bytes: what it delivers in
/// 1.25 round trips and a time that hosts need for batching; 0 kbit is no limit.
pub(crate) fn share_window(kbit: u32, least: Time, batching: Time) -> u32 {
    if kbit == 0 {
        return u32::MAX;
    }
    let time = (least.saturating_mul(5) / 4).saturating_add(batching);
    // kbit/s × ns / 8e6 = bytes
    u32::try_from(u64::from(kbit).saturating_mul(time) / 8_000_000).unwrap_or(u32::MAX)
}
