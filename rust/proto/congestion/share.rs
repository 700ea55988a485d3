// SPDX-License-Identifier: GPL-2.0

//! The receiver's part: how a device divides its inbound bandwidth among the connections
//! that send to it.
//!
//! The shares are max-min: there is a level that nobody may exceed, chosen such that what all
//! want below it is what the link carries. Everybody is told the level. Who wants less does
//! not notice it, and while all together want less than the link carries it is the whole link.
//!
//! What senders want is known from what they used, and late. So the link is watched as well:
//! whenever it was not full for a moment, the level rises until it is.

#![forbid(unsafe_code)]

use crate::os::{AllocError, Vec};
use crate::proto::api::Time;

/// A connection's place among the senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(usize);

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// What it used in the last measurement, kbit/s; 0 is not known yet.
    used: u32,
    /// Wants any amount.
    hungry: bool,
    /// Takes part in the division.
    active: bool,
    /// Last report; 0 is a free place.
    at: Time,
    /// The running measurement.
    since: Time,
    bytes: u64,
}

/// Max-min shares of a link. One per device and plane, guarded by the driver.
pub struct Shares {
    kbit: u32,
    entries: Vec<Entry>,
    /// Places below this have been used.
    used: usize,
    /// Where to look for a place that may go to another one, once all are.
    look: usize,
    /// Who takes part in the division; of these, those who would take more, and what is divided
    /// among them, kbit/s.
    active: u32,
    takers: u32,
    left: u32,
    /// What a sender may use at the most, kbit/s.
    level: u32,
    /// The level is computed anew when this has passed.
    due: Time,
    /// The level is at least this, since the link has not been full.
    raised: u32,
    /// What has come in all since then.
    since: Time,
    bytes: u64,
}

/// A place of a sender that has not reported for this long may go to another one.
const EXPIRY: Time = 100_000_000;
/// The link is watched for as long as it takes to carry this many bits: eight bursts.
const WATCH_BITS: u64 = 1 << 22;
const WATCH_MIN: Time = 10_000;
const WATCH_MAX: Time = 10_000_000;
/// What a sender uses is measured, and the level computed anew when nobody comes, in this time
/// or that for which the link is watched.
const PERIOD: Time = 100_000;
/// A sender is gone when it could have sent this many bits at the level.
const GONE_BITS: u64 = 1 << 19;
const GONE_MIN: Time = 20_000;
/// While so many send, the level is computed anew whenever one begins. Of more, one that begins
/// is counted among those who would take more until the next time.
const FEW: u32 = 64;
/// A division looks at every sender a few times. So much time for each lies between two, which
/// makes it 2 % of the time of a CPU at most.
const PERIOD_EACH: Time = 500;
/// Places that are looked at when all are taken.
const LOOK: usize = 16;

impl Shares {
    /// A link of `kbit` kbit/s (0: unknown, no shares are given out) with room for
    /// `senders` connections.
    pub fn new(kbit: u32, senders: usize) -> Result<Self, AllocError> {
        Ok(Self {
            kbit,
            entries: Vec::from_fn(senders, |_| Entry::default())?,
            used: 0,
            look: 0,
            active: 0,
            takers: 0,
            left: 0,
            level: kbit,
            due: 0,
            raised: 0,
            since: 0,
            bytes: 0,
        })
    }

    /// The link's rate has changed; 0 is unknown.
    pub fn set_kbit(&mut self, kbit: u32) {
        if kbit != self.kbit {
            self.kbit = kbit;
            self.level = kbit;
            self.due = 0;
            self.raised = 0;
        }
    }

    /// Reports that a connection received `bytes` since its last report. Gives its share in
    /// kbit/s (0: no limit) and the ticket for the next report.
    pub fn report(
        &mut self,
        now: Time,
        ticket: Option<Ticket>,
        bytes: u64,
    ) -> (u32, Option<Ticket>) {
        if self.kbit == 0 {
            return (0, None);
        }
        let place = ticket
            .filter(|t| self.entries.get(t.0).is_some_and(|e| e.at != 0))
            .or_else(|| self.place(now));
        let Some(place) = place else {
            return (0, None);
        };
        let level = self.level;
        let period =
            (self.watch_time().max(PERIOD)).max(PERIOD_EACH.saturating_mul(u64::from(self.active)));
        if let Some(e) = self.entries.get_mut(place.0) {
            if !e.active {
                // Nobody knows what it wants: an equal part.
                *e = Entry {
                    active: true,
                    hungry: true,
                    since: now,
                    ..Entry::default()
                };
                self.active = self.active.saturating_add(1);
                self.takers = self.takers.saturating_add(1);
                if self.active <= FEW {
                    self.due = now;
                } else if let Some(part) = self.left.checked_div(self.takers) {
                    self.level = part.max(self.raised).max(1);
                }
            }
            e.at = now.max(1);
            e.bytes = e.bytes.saturating_add(bytes);
            let time = now.saturating_sub(e.since);
            if time >= period {
                let kbit = e.bytes.saturating_mul(8_000_000).checked_div(time);
                let kbit = kbit.and_then(|k| u32::try_from(k).ok()).unwrap_or(u32::MAX);
                e.used = kbit.max(1);
                e.hungry = e.used >= level.saturating_sub(level / 4);
                e.since = now;
                e.bytes = 0;
            }
        }
        self.watch(now, bytes);
        if now >= self.due {
            self.divide(now);
            self.due = now.saturating_add(period);
        }
        (self.level, Some(place))
    }

    /// A place for one that has none: one that was never used, or one of a sender that is gone.
    fn place(&mut self, now: Time) -> Option<Ticket> {
        let free = if self.used < self.entries.len() {
            self.used = self.used.saturating_add(1);
            self.used.checked_sub(1)?
        } else {
            let places = self.entries.len();
            let gone = |e: &Entry| now.saturating_sub(e.at) > EXPIRY;
            let next = |i: usize| i.wrapping_add(1).checked_rem(places).unwrap_or(0);
            let mut found = None;
            for _ in 0..LOOK.min(places) {
                let at = self.look;
                self.look = next(at);
                if self.entries.get(at).is_some_and(gone) {
                    found = Some(at);
                    break;
                }
            }
            found?
        };
        let e = self.entries.get_mut(free)?;
        if e.active {
            self.active = self.active.saturating_sub(1);
        }
        *e = Entry::default();
        Some(Ticket(free))
    }

    fn watch_time(&self) -> Time {
        WATCH_BITS
            .saturating_mul(1_000_000)
            .checked_div(u64::from(self.kbit))
            .unwrap_or(WATCH_MAX)
            .clamp(WATCH_MIN, WATCH_MAX)
    }

    /// Raises the level when the link was not full.
    fn watch(&mut self, now: Time, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        let elapsed = now.saturating_sub(self.since);
        let time = self.watch_time();
        if elapsed < time {
            return;
        }
        // Idleness says nothing.
        let idle = elapsed > time.saturating_mul(4);
        let used = self.bytes.saturating_mul(8_000_000).checked_div(elapsed);
        let used = used.unwrap_or(0).max(1);
        let all = u64::from(self.kbit);
        self.raised = if idle {
            0
        } else if used < all.saturating_sub(all / 8) {
            let most = u64::from(self.level).saturating_mul(4);
            let level = u64::from(self.level).saturating_mul(all).checked_div(used);
            u32::try_from(level.unwrap_or(all).min(most).min(all)).unwrap_or(self.kbit)
        } else {
            self.raised.saturating_sub(self.raised / 8)
        };
        self.level = self.level.max(self.raised);
        self.since = now;
        self.bytes = 0;
    }

    /// What a sender may want: who leaves a quarter of the level unused gets what he used and
    /// a quarter more, so that he can grow.
    fn wants(e: &Entry) -> u32 {
        if e.hungry {
            u32::MAX
        } else {
            e.used.saturating_add(e.used / 4)
        }
    }

    fn divide(&mut self, now: Time) {
        let gone = GONE_BITS
            .saturating_mul(1_000_000)
            .checked_div(u64::from(self.level))
            .unwrap_or(EXPIRY)
            .clamp(GONE_MIN, EXPIRY);
        let mut count = 0u32;
        let used = self.used;
        for e in self.entries.iter_mut().take(used).filter(|e| e.active) {
            if now.saturating_sub(e.at) > gone {
                e.active = false;
            } else {
                count = count.saturating_add(1);
            }
        }
        self.level = self.kbit;
        self.active = count;
        self.takers = count;
        self.left = self.kbit;
        if count < 2 {
            return;
        }
        // A little less than the link carries, so that a queue that has built up goes away.
        let all = self.kbit.saturating_sub(self.kbit / 64);
        // Each pass satisfies somebody or is the last; four bring the level close enough, the
        // next period goes on from there.
        let (mut left, mut part) = (all, all.checked_div(count).unwrap_or(all));
        for _ in 0..4 {
            let (mut satisfied, mut sum) = (0u32, 0u32);
            for e in self.entries.iter().take(used).filter(|e| e.active) {
                let wants = Self::wants(e);
                if wants < part {
                    satisfied = satisfied.saturating_add(1);
                    sum = sum.saturating_add(wants);
                }
            }
            left = all.saturating_sub(sum);
            self.left = left;
            self.takers = count.saturating_sub(satisfied);
            let Some(next) = left.checked_div(count.saturating_sub(satisfied)) else {
                // All get what they want.
                return;
            };
            if next <= part {
                break;
            }
            part = next;
        }
        self.level = part.min(left).max(self.raised).max(1);
    }
}
