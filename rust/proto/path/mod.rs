// SPDX-License-Identifier: GPL-2.0

//! A path: source port, numbers sent and received, round-trip time, window and health.

#![forbid(unsafe_code)]

pub(crate) mod bits;
pub(crate) mod receive;
pub(crate) mod send;

pub(crate) use self::receive::{Arrival, ReceiveHalf};
pub(crate) use self::send::{Acked, Content, Record, SendHalf, OUTSTANDING_MAX};

use super::api::Time;
use super::congestion::{Controller, Window};
use super::recovery::Rtt;
use crate::os::AllocError;

/// Health of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It takes packets.
    Good,
    /// It is silent while others are not: its packets move, it is probed.
    Suspect,
    /// It was left: its epoch has ended, its port has changed, it is probed.
    Failed,
}

/// A probe that waits for its reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    /// When the first of the probes without an answer was sent: verdicts count from here.
    pub(crate) first: Time,
    /// When this one was sent.
    pub(crate) sent: Time,
    pub(crate) stamp: u32,
    pub(crate) challenge: u64,
    pub(crate) padding: u32,
}

/// Silence is looked into at least this often, unless the round trip is longer.
const SILENCE_MAX: Time = 250_000_000;

/// Greatest gap threshold: more reordering than this on one path is taken for loss.
pub(crate) const THRESHOLD_MAX: u32 = 64;

/// A byte in flight on a path without a queue.
const WEIGHT: u32 = 256;

/// More than so many times the least round trip makes no difference.
const STRETCH_MAX: u64 = 16;

/// Greatest exponent of the time that verdicts wait after having been wrong.
pub(crate) const PATIENCE_MAX: u8 = 6;

/// Everything about one path.
pub(crate) struct Path {
    pub(crate) tx: SendHalf,
    pub(crate) rx: ReceiveHalf,
    pub(crate) rtt: Rtt,
    /// What a byte in flight counts when paths are compared, in units of [`WEIGHT`]: the more, the
    /// longer the queue that stands on the path.
    weight: u32,
    pub(crate) window: Window,
    pub(crate) health: Health,
    pub(crate) port: u16,
    /// The port it began with. A path that had to leave it returns, since otherwise paths
    /// would gather on what worked during a failure.
    pub(crate) home: u16,
    /// The probe over the home port that waits for its reply, and replies in a row.
    pub(crate) home_challenge: u64,
    pub(crate) home_replies: u8,
    /// Plane, and the one that it is to change to; else the same.
    pub(crate) plane: u8,
    pub(crate) target: u8,
    /// When the port was changed last.
    pub(crate) rotated: Time,
    /// How often lately.
    pub(crate) rotations: u8,
    /// Numbers that must be acknowledged above a missing one before it counts as lost.
    pub(crate) threshold: u32,
    /// Acknowledged packets since the threshold rose or was lowered.
    pub(crate) calm: u32,
    /// When silence is looked at; `Time::MAX` is never.
    pub(crate) deadline: Time,
    /// The probe that waits for its reply.
    pub(crate) probe: Option<Pending>,
    /// Challenge of the last probe that was answered.
    pub(crate) answered: u64,
    /// Times in a row that a probe was answered and what was sent before it was missing.
    pub(crate) stalls: u8,
    /// Unanswered probes in a row.
    pub(crate) unanswered: u8,
    /// Replies in a row while the path is not good.
    pub(crate) replies: u8,
    /// The verdict was wrong this often, so that silence has to last longer; decays.
    pub(crate) patience: u8,
    /// Greatest echo seen in this epoch.
    pub(crate) echo: u32,
    pub(crate) has_echo: bool,
    /// The peer's counts in the last block.
    pub(crate) peer_received: u16,
    pub(crate) peer_ce: u16,
    pub(crate) peer_duplicates: u16,
    /// Last transmission of a data packet.
    pub(crate) sent: Time,
    /// A data packet was sent to break the silence.
    pub(crate) nudged: bool,
    /// Last time the peer showed that the path works.
    pub(crate) alive: Time,
    pub(crate) stats: PathStats,
}

/// What a path has done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathStats {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) resent: u64,
    pub(crate) moved: u64,
    pub(crate) received: u64,
    pub(crate) ce: u64,
    pub(crate) failures: u32,
}

impl Path {
    pub(crate) fn new(
        epoch: u16,
        records: usize,
        port: u16,
        controller: Controller,
    ) -> Result<Self, AllocError> {
        Ok(Self {
            tx: SendHalf::new(epoch, records)?,
            rx: ReceiveHalf::default(),
            rtt: Rtt::new(),
            weight: WEIGHT,
            window: Window::new(controller),
            health: Health::Good,
            port,
            home: port,
            home_challenge: 0,
            home_replies: 0,
            plane: 0,
            target: 0,
            rotated: 0,
            rotations: 0,
            threshold: 1,
            calm: 0,
            deadline: Time::MAX,
            probe: None,
            answered: 0,
            stalls: 0,
            unanswered: 0,
            replies: 0,
            patience: 0,
            echo: 0,
            has_echo: false,
            peer_received: 0,
            peer_ce: 0,
            peer_duplicates: 0,
            sent: 0,
            nudged: false,
            alive: 0,
            stats: PathStats::default(),
        })
    }

    /// Its round trip was measured; `least` is that of an empty network. The third power of what
    /// queues make of it: with the same in flight everywhere, a path gets one over its round trip of
    /// the rate, which is too much for links on which more paths meet than on others.
    pub(crate) fn weigh(&mut self, least: Time) {
        let unit = u64::from(WEIGHT);
        let stretch = (self.rtt.smoothed())
            .min(1 << 40)
            .saturating_mul(unit)
            .checked_div(least)
            .unwrap_or(unit)
            .clamp(unit, STRETCH_MAX.saturating_mul(unit));
        let cube = stretch.saturating_mul(stretch).saturating_mul(stretch) / (unit * unit);
        self.weight = cube as u32;
    }

    /// How busy the path is, to be compared with others; 0 exactly when nothing is in flight.
    pub(crate) fn score(&self) -> u32 {
        let load = u64::from(self.tx.inflight());
        let score = load.saturating_mul(u64::from(self.weight)) / u64::from(WEIGHT);
        u32::try_from(score).unwrap_or(u32::MAX)
    }

    /// How long nothing may be heard before the path is asked what has arrived, and asked
    /// again. A question costs two small packets and is no verdict, so that neither the
    /// machine's lateness nor a wrong verdict of the past delays it: what a lost last packet
    /// costs is this time and a round trip. `floor` keeps it above what timers can do.
    pub(crate) fn silence(&self, floor: Time) -> Time {
        let rtt = self.rtt.smoothed();
        rtt.saturating_mul(2)
            .saturating_add(self.rtt.variation().saturating_mul(4).min(rtt))
            .max(floor)
            .saturating_mul(1 << self.stalls.min(10))
            .min(SILENCE_MAX.max(rtt.saturating_mul(2)))
    }

    /// How long the answer to a probe may take.
    pub(crate) fn answer_time(&self, margin: Time) -> Time {
        self.rtt
            .smoothed()
            .saturating_add(
                self.rtt
                    .variation()
                    .saturating_mul(4)
                    .min(self.rtt.smoothed()),
            )
            .saturating_add(margin << self.patience.min(PATIENCE_MAX))
    }

    /// The connection comes up (again): both halves begin, `window` bytes may be in flight,
    /// full packets have `packet` bytes.
    pub(crate) fn reopen(&mut self, epoch: u16, peer_epoch: u16, window: u32, packet: u32) {
        self.open_epoch(epoch);
        self.tx.forget_acks();
        self.rx.reset(peer_epoch);
        self.window.begin(window, packet);
        self.weight = WEIGHT;
        self.health = Health::Good;
        self.deadline = Time::MAX;
        self.probe = None;
        self.nudged = false;
        self.stalls = 0;
        self.unanswered = 0;
        self.replies = 0;
        self.alive = 0;
    }

    /// It goes another way from now on: what it knew of its former one is void.
    pub(crate) fn begin_anew(&mut self) {
        self.home = self.port;
        self.home_challenge = 0;
        self.home_replies = 0;
        self.rotated = 0;
        self.rotations = 0;
        self.weight = WEIGHT;
        self.threshold = 1;
        self.calm = 0;
        self.probe = None;
        self.nudged = false;
        self.stalls = 0;
        self.unanswered = 0;
        self.replies = 0;
        self.patience = 0;
        self.alive = 0;
    }

    /// A new epoch begins: nothing is outstanding, and the peer counts anew.
    pub(crate) fn open_epoch(&mut self, epoch: u16) {
        self.tx.open(epoch);
        self.has_echo = false;
        self.peer_received = 0;
        self.peer_ce = 0;
        self.peer_duplicates = 0;
    }
}
