// SPDX-License-Identifier: GPL-2.0

//! What happens when nothing happens: silence on paths, their health, timers of streams,
//! the greatest packet, the end.

#![forbid(unsafe_code)]

use super::streams::List;
use super::transmit::first_from;
use super::{Connection, ConnectionState, MtuSearch, PAYLOAD_MTU_MIN, PAYLOAD_UNIT};
use crate::proto::api::{Direction, Time, DATA_OVERHEAD};
use crate::proto::path::{Health, SendHalf, PATIENCE_MAX};
use crate::proto::wire::Probe;

/// A timer that is as late shows that the machine stood still: this time is not held
/// against the peer.
const STOOD_STILL: Time = 5_000_000;

/// Between two requests to close.
pub(super) const CLOSE_RETRY: Time = 100_000_000;
pub(super) const CLOSE_TRIES: u8 = 5;

/// A path changes its port at most this often (each port is a flow for middle boxes): the
/// first time at once, then ever more seldom. After some peace it begins anew.
const ROTATION_MIN: Time = 50_000_000;
const ROTATION_MAX: Time = 1_000_000_000;
const ROTATION_PEACE: Time = 4_000_000_000;

/// A path that is away from its first port asks this often whether it works again.
const HOME: Time = 200_000_000;

/// Unanswered probes of a suspect path before it is left.
const FAIL_AFTER: u8 = 3;

/// Least time between two probes of a failed path, and greatest time between two probes.
const PROBE_FAILED: Time = 10_000_000;
const PROBE_MAX: Time = 500_000_000;

/// Once a connection is up, its paths are tried one after the other, this far apart.
const INTRODUCTION: Time = 250_000;

/// What goes unanswered is repeated this often before the time in between doubles.
const EAGER: u8 = 4;

/// Other paths that are asked at a time while nothing is heard.
const ASKED: u32 = 4;

/// Paths of acknowledgements that are asked at a time when the peer hears nothing.
const DOUBTED: u32 = 8;

/// So many packets may be outstanding, over all paths, that they are sent over other paths
/// while nothing is heard. Of more, some would have been answered.
const FEW: u32 = 8;

/// Copies of the first of them, the first time and later.
const COPIES_FIRST: u8 = 1;
const COPIES: u8 = 3;

/// Greatest time between two such attempts.
const RESCUE_MAX: Time = 64_000_000;

/// Questions may come this much later while nothing was lost lately: the time that the first
/// lost packet costs which nothing follows.
const PATIENCE: Time = 10_000_000;

/// For so long after a loss they are asked in time.
const TROUBLE: Time = 100_000_000;

/// For so long a good path that does not answer is asked as often as that.
const HOPE: Time = 2_000_000_000;

/// When nothing was heard for this long, ports are changed.
const DEAF: Time = 25_000_000;

/// Packets that a path which came back may have in flight at first.
const REVIVED_PACKETS: u32 = 4;

/// Padded probes without reply, while others are heard, before the packets get smaller.
const MTU_TRIES: u8 = 5;

/// Rounds of them in which nobody was heard at all.
const MTU_ROUNDS: u8 = 8;

impl Connection {
    /// When [`Connection::handle_timeout`] or [`Connection::poll_transmit`] is due next,
    /// whatever arrives until then. Always enough for progress.
    pub fn poll_timeout(&self) -> Option<Time> {
        let t = self.exact_timeout().min(self.patient_timeout());
        (t != Time::MAX).then_some(t)
    }

    /// When to set the timer to: [`Connection::poll_timeout`], but no sooner than
    /// `PATIENCE` for questions about what has arrived while nothing was lost lately.
    /// While packets flow such a question has an answer before it is asked, and an
    /// interrupt costs more than many of them. Once a time was returned, call
    /// [`Connection::handle_timeout`] then, though later ones follow.
    pub fn wake_at(&mut self, now: Time) -> Option<Time> {
        let mut patient = self.patient_timeout();
        if now.saturating_sub(self.trouble) >= TROUBLE {
            patient = patient.max(now.saturating_add(PATIENCE));
        }
        let t = self.exact_timeout().min(patient);
        self.woken = self.woken.min(t);
        (t != Time::MAX).then_some(t)
    }

    /// When to ask what has arrived, and to judge who is silent.
    fn patient_timeout(&self) -> Time {
        if self.state == ConnectionState::Up {
            self.stream_timer.min(self.path_timer)
        } else {
            self.stream_timer
        }
    }

    /// When something else is due.
    fn exact_timeout(&self) -> Time {
        let mut t = self.stream_wait;
        if let Some(h) = self.handshake_due() {
            t = t.min(h);
        }
        match self.state {
            ConnectionState::Up => {
                t = t.min(self.ack.deadline).min(self.home_timer);
                t = t.min(self.plane_timer);
                t = t.min(self.rest.due);
                if self.mtu.probing != 0 {
                    t = t.min(self.mtu.due);
                }
                if self.streams.len() == 0 {
                    t = t.min(self.close_due);
                }
                let ready = self.losses() != 0
                    || self.donors != 0
                    || self.rescue.content.is_some()
                    || self.streams.first(List::Send).is_some();
                if ready && (self.inflight == 0 || self.inflight < self.windows) {
                    let rescue =
                        self.rescue.running && self.donors != 0 || self.rescue.content.is_some();
                    let ways = if rescue {
                        u64::MAX
                    } else {
                        self.usable() | self.losses()
                    };
                    t = t.min(self.planes_next(ways));
                }
            }
            ConnectionState::Closing => t = t.min(self.close_due).min(self.ack.deadline),
            ConnectionState::Connecting | ConnectionState::Resting | ConnectionState::Failed => {
                if self.streams.len() == 0 {
                    t = t.min(self.close_due);
                }
            }
            ConnectionState::Closed => {}
        }
        t
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time) {
        let mut due = self.stream_timer;
        if self.state == ConnectionState::Up {
            due = due.min(self.path_timer).min(self.ack.deadline);
        } else if self.state == ConnectionState::Connecting {
            due = due.min(self.attempt.due);
        }
        // Lateness is what the timer adds, not what it was allowed.
        let woken = core::mem::replace(&mut self.woken, Time::MAX);
        if woken != Time::MAX {
            due = due.max(woken);
        }
        if due < now {
            let late = now.saturating_sub(due);
            self.margin.late(now, late);
            if late >= STOOD_STILL {
                // And what waits in the receive queue gets the time to be read.
                self.excuse_streams(now, late.saturating_add(STOOD_STILL));
            }
        }
        if self.stream_timer <= now {
            self.stream_timers(now);
        }
        if self.state == ConnectionState::Up && self.path_timer <= now {
            self.path_timers(now);
        }
        if self.state == ConnectionState::Up && self.home_timer <= now {
            self.ask_home(now);
        }
        if self.mtu.probing != 0 && self.mtu.due <= now && self.mtu.tries >= MTU_TRIES {
            self.smaller_packets(now);
        }
        if self.state == ConnectionState::Up && self.rest.due <= now {
            self.look_for_idleness(now);
        }
        if self.streams.len() == 0 && self.close_due <= now {
            self.close_timer(now);
        }
    }

    /// The last `by` do not count against the retry limit of any stream that waits.
    pub(super) fn excuse_streams(&mut self, now: Time, by: Time) {
        for _ in 0..self.streams.bound() {
            let Some(i) = self.streams.delist(List::Timer) else {
                break;
            };
            if let Some(s) = self.streams.stream_mut(i) {
                s.excuse(now, by);
            }
            self.streams.enlist(List::Timer, i);
        }
    }

    fn stream_timers(&mut self, now: Time) {
        self.stream_timer = Time::MAX;
        self.stream_wait = Time::MAX;
        // A question, no verdict: the lateness of machines does not count.
        let wait = self.srtt.saturating_mul(2).saturating_add(self.pause());
        let doubled = |n: u8| wait << n.saturating_sub(EAGER).min(10);
        // Each slot once; those that still have a timer go back to the end.
        for _ in 0..self.streams.bound() {
            let Some(i) = self.streams.delist(List::Timer) else {
                break;
            };
            let Some(slot) = self.streams.slot_mut(i) else {
                break;
            };
            let Some(s) = slot.stream.as_deref_mut() else {
                continue;
            };
            let mut fired = false;
            if s.poll_timeout().is_some_and(|t| t <= now) {
                s.on_timeout(now);
                fired = true;
            }
            let mut timer = s.poll_timeout().unwrap_or(Time::MAX);
            let wait = s.poll_wait().unwrap_or(Time::MAX);
            let mut ask = false;
            for (d, dir) in [Direction::Request, Direction::Response]
                .into_iter()
                .enumerate()
            {
                let Some(since) = s.quiet_since(dir) else {
                    if let Some(q) = slot.queries.get_mut(d) {
                        *q = 0;
                    }
                    continue;
                };
                let sent = slot.queries.get(d).copied().unwrap_or(0);
                let base = if sent == 0 { since } else { slot.queried };
                let due = base.saturating_add(doubled(sent));
                if due <= now {
                    if let (Some(n), Some(q)) = (slot.queries.get_mut(d), slot.query.get_mut(d)) {
                        *n = sent.saturating_add(1);
                        *q = true;
                        ask = true;
                    }
                    timer = timer.min(now.saturating_add(doubled(sent.saturating_add(1))));
                } else {
                    timer = timer.min(due);
                }
            }
            if ask {
                slot.queried = now;
                self.streams.enlist(List::Query, i);
            }
            if timer != Time::MAX {
                // A timer that could not act does not spin.
                let timer = timer.max(now.saturating_add(1));
                self.streams.enlist(List::Timer, i);
                self.stream_timer = self.stream_timer.min(timer);
                self.stream_wait = self.stream_wait.min(wait.max(timer));
            }
            if fired {
                self.touch(now, i);
            }
        }
    }

    fn path_timers(&mut self, now: Time) {
        let mut mask = self.path_mask();
        while mask != 0 {
            let i = mask.trailing_zeros() as usize;
            mask &= mask.wrapping_sub(1);
            if self.paths.get(i).is_some_and(|p| p.deadline <= now) {
                self.path_silent(now, i);
            }
        }
        self.path_timer = self
            .paths
            .iter()
            .map(|p| p.deadline)
            .min()
            .unwrap_or(Time::MAX);
    }

    /// Nothing was heard on path `i` for its time of silence.
    fn path_silent(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let margin = self.margin.get();
        let pause = self.pause();
        let newest = self.newest;
        let donating = self.donors & bit != 0;
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        match p.health {
            Health::Good => {
                let Some(pending) = p.probe else {
                    let outstanding = p.tx.is_outstanding();
                    if !outstanding && self.probe & bit == 0 && p.alive != 0 {
                        p.deadline = Time::MAX;
                        return;
                    }
                    // Ask what has arrived.
                    p.deadline = now.saturating_add(p.silence(pause));
                    self.probe |= bit;
                    if outstanding {
                        self.unheard(now, i);
                    }
                    return;
                };
                p.unanswered = p.unanswered.saturating_add(1);
                let judged = now >= pending.first.saturating_add(p.answer_time(margin));
                if judged && newest >= pending.first && self.good & !self.silent & !bit != 0 {
                    self.suspect(now, i);
                    return;
                }
                // The probe or its answer may be lost as well; and when nobody progresses,
                // neither network nor peer is to blame on one path. Ask again.
                let wait = p.silence(pause) << p.unanswered.saturating_sub(EAGER).min(10);
                let most = if now.saturating_sub(pending.first) < HOPE {
                    RESCUE_MAX
                } else {
                    PROBE_MAX
                };
                p.deadline = now.saturating_add(wait.min(most));
                self.probe |= bit;
                self.unheard(now, i);
            }
            Health::Suspect => {
                let heard = p.probe.is_some_and(|q| newest >= q.sent);
                p.unanswered = p.unanswered.saturating_add(1);
                if p.unanswered > FAIL_AFTER && heard && !donating {
                    self.leave(now, i);
                    return;
                }
                let wait = p.answer_time(margin) << p.unanswered.min(10);
                p.deadline = now.saturating_add(wait.min(PROBE_MAX));
                self.probe |= bit;
                if !heard {
                    self.ask_others(now, i);
                }
            }
            Health::Failed => {
                p.unanswered = p.unanswered.saturating_add(1);
                p.replies = 0;
                let wait = p
                    .answer_time(margin)
                    .max(PROBE_FAILED)
                    .checked_shl(u32::from(p.unanswered.min(10)))
                    .unwrap_or(PROBE_MAX)
                    .min(PROBE_MAX);
                p.deadline = now.saturating_add(wait);
                self.probe |= bit;
                self.rotate(now, i);
            }
        }
    }

    /// Lets every path be tried, so that it is known which ones work before much depends
    /// on one.
    pub(super) fn introduce_paths(&mut self, now: Time) {
        if self.loopback {
            return;
        }
        let n = usize::from(self.agreed.paths);
        let mut at = now;
        for p in self.paths.iter_mut().take(n) {
            at = at.saturating_add(INTRODUCTION);
            p.deadline = at;
        }
        self.path_timer = now.saturating_add(INTRODUCTION);
        self.trouble = now;
    }

    /// Good path `i` has not answered in time. It gets nothing new until it does. What it
    /// has outstanding is sent elsewhere as soon as somebody else is heard: a verdict takes
    /// its time, a duplicate costs little. A few packets do not even wait for that.
    fn unheard(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        self.trouble = now;
        self.silent |= bit;
        self.proven &= !bit;
        self.overdue &= !bit;
        let newest = self.newest;
        let pause = self.pause();
        let calm = self.good & !self.silent != 0;
        let few = self.carries_few();
        let due = self.rescue.due;
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        let (since, asked) = match p.probe {
            Some(q) => (q.first, true),
            None => (p.sent.saturating_add(1), false),
        };
        let heard = newest >= since;
        let silence = p.silence(pause);
        if self.emptied & bit == 0 && p.tx.is_outstanding() {
            if heard && calm {
                self.empty(i);
                return;
            }
            if few && now < due {
                p.deadline = p.deadline.min(due);
                self.path_timer = self.path_timer.min(due);
                return;
            }
            if few {
                self.rescue(now, i);
            }
        }
        if now.saturating_sub(self.rescue.heard) >= silence {
            if self.rescue.since == 0 {
                self.rescue.since = now;
            }
            self.ask_others(now, i);
        }
        let deaf = self.rescue.since != 0 && now.saturating_sub(self.rescue.since) > DEAF;
        let alone = self.good & !bit == 0 && asked && now.saturating_sub(since) > DEAF;
        if deaf || alone {
            self.rotate(now, i);
        }
    }

    /// Whether few packets that carry something wait for an acknowledgement.
    fn carries_few(&self) -> bool {
        let mut n = 0u32;
        let mut mask = self.good & !self.emptied;
        while mask != 0 && n <= FEW {
            let i = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            if let Some(p) = self.paths.get(i as usize) {
                n = n.saturating_add(p.tx.carries(FEW.saturating_add(1)));
            }
        }
        n <= FEW
    }

    /// What path `i` has outstanding is to be sent over others, under numbers of theirs.
    fn empty(&mut self, i: usize) {
        let bit = 1u64 << (i & 63);
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        let bytes = p.tx.donate_all();
        self.inflight = self.inflight.saturating_sub(u64::from(bytes));
        if p.tx.has_donations() {
            self.donors |= bit;
        }
        if p.tx.has_lost() {
            self.lost |= bit;
        }
        // Numbers that carry nothing any more wait until it is heard of.
        self.emptied |= bit;
        self.refresh(i);
    }

    /// Nothing is heard: the few packets that path `i` has outstanding try their luck over
    /// others, the first of them over several.
    fn rescue(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let tries = self.rescue.tries;
        let pause = self.pause();
        let alone = self.good & !bit == 0;
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        let wait = p.silence(pause) << tries.saturating_sub(EAGER).min(10);
        if alone {
            let before = p.tx.inflight();
            p.tx.give_up();
            let bytes = before.saturating_sub(p.tx.inflight());
            self.inflight = self.inflight.saturating_sub(u64::from(bytes));
            if p.tx.has_lost() {
                self.lost |= bit;
            }
            self.refresh(i);
        } else {
            self.empty(i);
            if self.donors & bit == 0 {
                return;
            }
            self.rescue.running = true;
            self.rescue.content = None;
            self.rescue.copies = if tries == 0 { COPIES_FIRST } else { COPIES };
            self.rescue.used = bit;
        }
        self.rescue.tries = tries.saturating_add(1);
        if tries >= EAGER {
            self.rescue.due = now.saturating_add(wait.min(RESCUE_MAX));
        }
    }

    /// The peer hears nothing: paths that carry acknowledgements alone are asked, since they
    /// know nothing of their own silence.
    pub(super) fn ask_doubted(&mut self, now: Time) {
        let pause = self.pause();
        let mut mask = self.good & !self.silent & !self.probe;
        let mut left = DOUBTED;
        while mask != 0 && left != 0 {
            let i = first_from(mask, self.ack.rotor);
            mask &= !(1u64 << (i & 63));
            let Some(p) = self.paths.get_mut(i as usize) else {
                break;
            };
            let lately = now.saturating_sub(p.alive) < pause.saturating_mul(2);
            if p.probe.is_some() || p.tx.is_outstanding() || lately {
                continue;
            }
            left = left.wrapping_sub(1);
            self.probe |= 1u64 << (i & 63);
            let soon = now.saturating_add(p.silence(pause));
            p.deadline = p.deadline.min(soon);
            self.path_timer = self.path_timer.min(soon);
        }
    }

    /// Path `i` has shown that it works: what was sent on it later than what others are
    /// silent about has arrived.
    pub(super) fn heard(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        self.proven |= bit;
        self.silent &= !bit;
        self.rescue.over(now);
        if self.emptied & bit != 0 {
            self.emptied &= !bit;
            self.donors &= !bit;
            if let Some(p) = self.paths.get_mut(i) {
                p.tx.keep_donations();
                if p.tx.has_lost() {
                    self.lost |= bit;
                }
            }
        }
        // The others soon, if they are not heard as well.
        let mut mask = self.silent & !self.emptied;
        while mask != 0 {
            let j = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            let Some(p) = self.paths.get_mut(j as usize) else {
                break;
            };
            if p.tx.is_outstanding() && p.probe.is_some_and(|q| q.first <= self.newest) {
                let soon = now.saturating_add(p.rtt.smoothed() / 2);
                p.deadline = p.deadline.min(soon);
                self.path_timer = self.path_timer.min(soon);
            }
        }
    }

    /// Probes some paths besides `i`: good ones, first those that worked last; ones that
    /// are not, before their time; and the ports that paths began with.
    pub(super) fn ask_others(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let pause = self.pause();
        let unit = self.srtt.saturating_mul(2).max(pause);
        if now.saturating_sub(self.rescue.asked) < unit {
            return;
        }
        self.rescue.asked = now;
        let mut candidates = self.good & !bit & !self.probe;
        let mut left = ASKED;
        while candidates != 0 && left != 0 {
            let Some(j) = self.latest_proven(candidates) else {
                break;
            };
            candidates &= !(1u64 << (j & 63));
            let Some(p) = self.paths.get_mut(j as usize) else {
                break;
            };
            if p.probe.is_some() {
                continue;
            }
            left = left.wrapping_sub(1);
            self.probe |= 1u64 << (j & 63);
            let soon = now.saturating_add(p.silence(pause));
            p.deadline = p.deadline.min(soon);
            self.path_timer = self.path_timer.min(soon);
        }
        let soon = now.saturating_add(pause);
        let mut bad = self.path_mask() & !self.good & !bit;
        let start = self.choice() as u32;
        let mut left = ASKED;
        while bad != 0 && left != 0 {
            let j = first_from(bad, start);
            bad &= !(1u64 << (j & 63));
            let Some(p) = self.paths.get_mut(j as usize) else {
                break;
            };
            left = left.wrapping_sub(1);
            // A suspect path goes on counting, or one whose port is dead would keep it for as
            // long as others fall silent now and then.
            if p.health == Health::Failed {
                p.unanswered = 0;
            }
            p.deadline = p.deadline.min(soon);
            self.path_timer = self.path_timer.min(soon);
        }
        if self.home_timer != Time::MAX {
            let mut away = self.path_mask() & !self.proven;
            let mut left = ASKED;
            while away != 0 && left != 0 {
                let j = first_from(away, start);
                away &= !(1u64 << (j & 63));
                if self.paths.get(j as usize).is_some_and(|p| p.port != p.home) {
                    left = left.wrapping_sub(1);
                    self.home_probe |= 1u64 << (j & 63);
                }
            }
        }
    }

    /// Of some paths, the one that has shown last that it works; of equals the next in turn.
    pub(super) fn latest_proven(&self, mut mask: u64) -> Option<u32> {
        let mut best: Option<(bool, Time, u32, u32)> = None;
        while mask != 0 {
            let i = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            let Some(p) = self.paths.get(i as usize) else {
                break;
            };
            // Nothing in flight: a path that has may be just as silent.
            let idle = p.tx.inflight() == 0;
            let proven = if self.proven & 1u64 << (i & 63) != 0 {
                p.alive
            } else {
                0
            };
            let turn = self.rotor.wrapping_sub(i).wrapping_sub(1) & 63;
            let this = (idle, proven, turn, i);
            if best.is_none_or(|b| (this.0, this.1, this.2) > (b.0, b.1, b.2)) {
                best = Some(this);
            }
        }
        best.map(|b| b.3)
    }

    /// Path `i` is silent while others are not: its packets move.
    fn suspect(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let margin = self.margin.get();
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        p.health = Health::Suspect;
        p.unanswered = 1;
        let window = p.window.bytes();
        let bytes = p.tx.donate_all();
        p.deadline = now.saturating_add(p.answer_time(margin));
        self.inflight = self.inflight.saturating_sub(u64::from(bytes));
        self.windows = self.windows.saturating_sub(u64::from(window));
        self.good &= !bit;
        self.lost &= !bit;
        self.overdue &= !bit;
        self.homing &= !bit;
        self.proven &= !bit;
        self.silent &= !bit;
        self.emptied &= !bit;
        self.probe |= bit;
        if p.tx.has_donations() {
            self.donors |= bit;
        }
        self.changed |= bit;
        self.counters.path_suspected = self.counters.path_suspected.wrapping_add(1);
        self.refresh(i);
    }

    /// Leaves path `i`: a new epoch under a new port. Everything has been taken over.
    fn leave(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        p.health = Health::Failed;
        p.stats.failures = p.stats.failures.wrapping_add(1);
        p.unanswered = 0;
        p.replies = 0;
        p.probe = None;
        p.open_epoch(p.tx.epoch.wrapping_add(1));
        p.rtt = crate::proto::recovery::Rtt::new();
        p.deadline = now.saturating_add(PROBE_FAILED);
        self.lost &= !bit;
        self.donors &= !bit;
        self.probe |= bit;
        self.changed |= bit;
        self.counters.path_failed = self.counters.path_failed.wrapping_add(1);
        self.rotate(now, i);
        self.refresh(i);
    }

    /// A source port drawn at random.
    pub(super) fn any_port(&mut self) -> u16 {
        let drawn = (self.choice() & 0x3fff) as u16;
        self.cfg.port_base.wrapping_add(drawn)
    }

    /// Gives path `i` another port, if it has had its own for some time.
    fn rotate(&mut self, now: Time, i: usize) {
        let port = self.any_port();
        if let Some(p) = self.paths.get_mut(i) {
            let kept = now.saturating_sub(p.rotated);
            if p.rotated == 0 || kept > ROTATION_PEACE {
                p.rotations = 0;
            }
            let wait = ROTATION_MIN
                .saturating_mul(p.rotations.into())
                .min(ROTATION_MAX);
            if kept >= wait {
                p.rotations = p.rotations.saturating_add(1);
                p.port = port;
                p.rotated = now.max(1);
                p.home_replies = 0;
                self.home_timer = self.home_timer.min(now.saturating_add(HOME));
            }
        }
    }

    /// Path `i` works (again).
    pub(super) fn revive(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let packet = self.packet_bytes();
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        match p.health {
            Health::Good => return,
            Health::Suspect => {
                // The verdict was wrong or the trouble short.
                p.patience = p.patience.saturating_add(1).min(PATIENCE_MAX);
                p.tx.keep_donations();
            }
            Health::Failed => {
                let window = packet.saturating_mul(REVIVED_PACKETS);
                p.window.begin(window, packet);
                p.patience = 0;
            }
        }
        p.health = Health::Good;
        p.unanswered = 0;
        p.replies = 0;
        p.probe = None;
        p.alive = now;
        self.rescue.over(now);
        self.donors &= !bit;
        if p.tx.has_lost() {
            self.lost |= bit;
        }
        p.deadline = Time::MAX;
        self.windows = self.windows.saturating_add(u64::from(p.window.bytes()));
        self.good |= bit;
        self.proven |= bit;
        self.changed |= bit;
        self.counters.path_recovered = self.counters.path_recovered.wrapping_add(1);
        self.refresh(i);
        if self.several {
            self.wake_plane(now, i);
        }
    }

    /// Sends a probe over the first port of each path that is good without it.
    fn ask_home(&mut self, now: Time) {
        let mut away = false;
        for (i, p) in self.paths.iter_mut().enumerate() {
            if p.port == p.home {
                continue;
            }
            away = true;
            let bit = 1u64 << (i & 63);
            if p.health == Health::Good && self.homing & bit == 0 {
                if p.home_challenge != 0 {
                    // The last one was not answered.
                    p.home_replies = 0;
                }
                self.home_probe |= bit;
            }
        }
        self.home_timer = if away {
            now.saturating_add(HOME)
        } else {
            Time::MAX
        };
    }

    /// Whether the reply is to a probe over a first port.
    pub(super) fn home_reply(&mut self, now: Time, p: &Probe) -> bool {
        let i = usize::from(p.path);
        let Some(path) = self.paths.get_mut(i) else {
            return false;
        };
        if path.home_challenge == 0 || path.home_challenge != p.challenge {
            return false;
        }
        path.home_challenge = 0;
        path.home_replies = path.home_replies.saturating_add(1);
        self.counters.probe_replies = self.counters.probe_replies.wrapping_add(1);
        self.newest = self.newest.max(SendHalf::time_of(now, p.timestamp));
        // The port it has now does not work: what is outstanding there is lost anyway.
        let nothing_better = self.good & !self.silent == 0;
        match path.health {
            Health::Good if self.silent & 1u64 << (i & 63) != 0 => {
                path.alive = now;
                self.go_home(i);
                self.heard(now, i);
            }
            Health::Good if path.home_replies >= 2 => {
                self.homing |= 1u64 << (i & 63);
                self.refresh(i);
            }
            Health::Good => {}
            Health::Suspect | Health::Failed if nothing_better => {
                self.go_home(i);
                self.revive(now, i);
            }
            Health::Suspect | Health::Failed => {}
        }
        true
    }

    /// Path `i` takes its first port again. Nothing is outstanding, so its numbers go on.
    pub(super) fn go_home(&mut self, i: usize) {
        let bit = 1u64 << (i & 63);
        self.homing &= !bit;
        if let Some(p) = self.paths.get_mut(i) {
            p.port = p.home;
            p.home_replies = 0;
            self.changed |= bit;
        }
    }

    pub(super) fn begin_mtu_search(&mut self, now: Time) {
        self.mtu = MtuSearch {
            probing: if self.loopback {
                0
            } else {
                self.agreed.payload_mtu
            },
            tries: 0,
            rounds: 0,
            due: now,
            challenge: 0,
        };
    }

    /// How long a padded probe may take.
    pub(super) fn mtu_wait(&self) -> Time {
        self.srtt
            .saturating_mul(3)
            .saturating_add(self.margin.get().saturating_mul(4))
    }

    /// Whether the reply is to the running probe for the greatest packet.
    pub(super) fn mtu_reply(&mut self, now: Time, p: &Probe) -> bool {
        if self.mtu.probing == 0 || p.challenge != self.mtu.challenge {
            return false;
        }
        self.counters.probe_replies = self.counters.probe_replies.wrapping_add(1);
        self.newest = self.newest.max(SendHalf::time_of(now, p.timestamp));
        self.mtu.probing = 0;
        true
    }

    /// Full packets do not get through although the peer is there: use smaller ones.
    fn smaller_packets(&mut self, now: Time) {
        /// Path MTUs worth trying, IP header included.
        const STEPS: [u32; 7] = [9000, 4200, 2048, 1500, 1420, 1280, 1024];
        let headers = if self.cfg.ipv6 { 48 } else { 28 } + DATA_OVERHEAD as u32;
        let now_uses = self.agreed.payload_mtu;
        let next = STEPS
            .iter()
            .map(|m| m.saturating_sub(headers) / PAYLOAD_UNIT * PAYLOAD_UNIT)
            .find(|p| *p < now_uses && *p >= PAYLOAD_MTU_MIN);
        // No answer to anything: it is not about size.
        let heard = self.paths.iter().any(|p| p.alive != 0);
        match next {
            Some(payload) if heard => {
                self.agreed.payload_mtu = payload;
                for i in 0..self.streams.used() as u32 {
                    if let Some(s) = self.streams.stream_mut(i) {
                        s.set_payload_mtu(payload);
                    }
                }
                for p in self.paths.iter_mut() {
                    p.stalls = 0;
                    if p.deadline != Time::MAX {
                        p.deadline = now;
                        self.path_timer = now;
                    }
                }
                self.begin_mtu_search(now);
            }
            // Nothing smaller is worth a try, or nobody is there: a path that stalls asks again.
            None => self.mtu.probing = 0,
            Some(_) if self.mtu.rounds >= MTU_ROUNDS => self.mtu.probing = 0,
            Some(_) => {
                self.mtu.rounds = self.mtu.rounds.saturating_add(1);
                self.mtu.tries = 0;
                self.mtu.due = now.saturating_add(PROBE_MAX);
            }
        }
    }

    fn close_timer(&mut self, now: Time) {
        match self.state {
            ConnectionState::Up if self.loopback => {
                self.state = ConnectionState::Closed;
                self.event_closed = true;
            }
            ConnectionState::Up => {
                self.state = ConnectionState::Closing;
                self.close_number = self.close_number.wrapping_add(1);
                self.close_tries = 0;
                self.close_due = now;
            }
            ConnectionState::Closing if self.close_tries >= CLOSE_TRIES => {
                self.state = ConnectionState::Closed;
                self.event_closed = true;
            }
            ConnectionState::Connecting | ConnectionState::Resting | ConnectionState::Failed => {
                self.state = ConnectionState::Closed;
                self.event_closed = true;
            }
            _ => {}
        }
        if self.state == ConnectionState::Closed {
            self.close_due = Time::MAX;
        }
    }
}
