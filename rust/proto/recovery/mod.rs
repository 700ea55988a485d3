// SPDX-License-Identifier: GPL-2.0

//! Round-trip times and what timers are made of.

#![forbid(unsafe_code)]

use crate::proto::api::Time;

/// What is assumed before the first measurement.
pub(crate) const INITIAL_RTT: Time = 1_000_000;

/// How long a least round-trip time is believed. The path may have become longer.
const MIN_AGE: Time = 10_000_000_000;

/// A window of the least value: that of the running period and that of the one before.
#[derive(Clone, Copy, Debug)]
struct Least {
    now: Time,
    before: Time,
    since: Time,
}

/// Round-trip time of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    smoothed: Time,
    variation: Time,
    latest: Time,
    least: Least,
    samples: u32,
}

impl Rtt {
    pub(crate) const fn new() -> Self {
        Self {
            smoothed: INITIAL_RTT,
            variation: INITIAL_RTT / 2,
            latest: INITIAL_RTT,
            least: Least {
                now: Time::MAX,
                before: Time::MAX,
                since: 0,
            },
            samples: 0,
        }
    }

    /// Takes a measurement.
    pub(crate) fn sample(&mut self, now: Time, rtt: Time) {
        let rtt = rtt.max(1);
        self.latest = rtt;
        if self.samples == 0 {
            self.smoothed = rtt;
            self.variation = rtt / 2;
            self.least.since = now;
        } else {
            let difference = self.smoothed.abs_diff(rtt);
            self.variation = (self.variation.saturating_mul(3).saturating_add(difference)) / 4;
            self.smoothed = (self.smoothed.saturating_mul(7).saturating_add(rtt)) / 8;
        }
        self.samples = self.samples.saturating_add(1);
        if now.saturating_sub(self.least.since) > MIN_AGE {
            self.least.before = self.least.now;
            self.least.now = Time::MAX;
            self.least.since = now;
        }
        self.least.now = self.least.now.min(rtt);
    }

    /// Smoothed value; the initial one when nothing was measured.
    pub(crate) fn smoothed(&self) -> Time {
        self.smoothed
    }

    /// The latest one.
    pub(crate) fn latest(&self) -> Time {
        self.latest
    }

    /// Least of the last 10 to 20 seconds.
    pub(crate) fn least(&self) -> Option<Time> {
        let least = self.least.now.min(self.least.before);
        (least != Time::MAX).then_some(least)
    }

    /// Whether anything was measured.
    pub(crate) fn is_known(&self) -> bool {
        self.samples != 0
    }

    /// Variation of the measurements.
    pub(crate) fn variation(&self) -> Time {
        self.variation
    }
}

/// The longest of the recent round-trip times, of any path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Longest {
    rtt: Time,
    at: Time,
}

impl Longest {
    /// Takes a measurement; the former longest one fades by a quarter in each `srtt`.
    pub(crate) fn sample(&mut self, now: Time, rtt: Time, srtt: Time) {
        if rtt >= self.rtt {
            self.rtt = rtt;
            self.at = now;
        } else if now.saturating_sub(self.at) >= srtt {
            self.rtt = self.rtt.saturating_sub(self.rtt.saturating_sub(rtt) / 4);
            self.at = now;
        }
    }

    pub(crate) fn get(&self) -> Time {
        self.rtt
    }
}

/// How much later than wished things happen on this machine and at the peer: the margin of
/// every verdict on silence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Margin {
    floor: Time,
    /// Recent lateness of own timers, decaying.
    late: Time,
    /// The same of the peer, as it says.
    peer_late: Time,
    /// Recent delay of acknowledgements at the peer, decaying.
    ack_delay: Time,
    decayed: Time,
}

/// The lateness is halved in each of these.
const DECAY: Time = 1_000_000_000;

impl Margin {
    pub(crate) const fn new(floor: Time) -> Self {
        Self {
            floor,
            late: 0,
            peer_late: 0,
            ack_delay: 0,
            decayed: 0,
        }
    }

    fn decay(&mut self, now: Time) {
        if now.saturating_sub(self.decayed) >= DECAY {
            self.decayed = now;
            self.late /= 2;
            self.peer_late /= 2;
            self.ack_delay /= 2;
        }
    }

    /// A timer was this late.
    pub(crate) fn late(&mut self, now: Time, by: Time) {
        self.decay(now);
        self.late = self.late.max(by);
    }

    /// The peer said that its acknowledgement waited for this long.
    pub(crate) fn ack_delay(&mut self, now: Time, by: Time) {
        self.decay(now);
        self.ack_delay = self.ack_delay.max(by);
    }

    /// The peer says that its timers are this late.
    pub(crate) fn peer_late(&mut self, now: Time, by: Time) {
        self.decay(now);
        self.peer_late = self.peer_late.max(by);
    }

    /// How much of a round trip machines that stand still explain.
    pub(crate) fn both(&self) -> Time {
        self.late.saturating_add(self.peer_late)
    }

    /// Least time between two questions on a path.
    pub(crate) fn pause(&self) -> Time {
        self.floor / 2
    }

    /// Recent lateness.
    pub(crate) fn lateness(&self) -> Time {
        self.late
    }

    /// The margin.
    pub(crate) fn get(&self) -> Time {
        self.floor
            .max(self.ack_delay.saturating_mul(2))
            .max(self.late.max(self.peer_late).saturating_mul(4))
    }
}
