// SPDX-License-Identifier: GPL-2.0

//! The receiver's part: how a device divides its inbound bandwidth among the connections
//! that send to it.

#![forbid(unsafe_code)]

use crate::os::{AllocError, Vec};
use crate::proto::api::Time;

/// A connection's place among the senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(usize);

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// What it used lately, kbit/s.
    used: u32,
    wants: u32,
    /// Last report; 0 is a free place.
    at: Time,
    share: u32,
}

/// Max-min shares of a link. One per device and plane, guarded by the driver.
pub struct Shares {
    kbit: u32,
    entries: Vec<Entry>,
    /// Shares are computed anew when this has passed.
    due: Time,
}

/// A sender that has not reported for this long takes no share.
const EXPIRY: Time = 20_000_000;
/// How often shares are computed anew.
const PERIOD: Time = 100_000;

impl Shares {
    /// A link of `kbit` kbit/s (0: unknown, no shares are given out) with room for
    /// `senders` connections.
    pub fn new(kbit: u32, senders: usize) -> Result<Self, AllocError> {
        Ok(Self {
            kbit,
            entries: Vec::from_fn(senders, |_| Entry::default())?,
            due: 0,
        })
    }

    /// The link's rate has changed; 0 is unknown.
    pub fn set_kbit(&mut self, kbit: u32) {
        self.kbit = kbit;
    }

    /// Reports that a connection received `used` kbit/s lately. Gives its share in kbit/s
    /// (0: no limit) and the ticket for the next report.
    pub fn report(
        &mut self,
        now: Time,
        ticket: Option<Ticket>,
        used: u32,
    ) -> (u32, Option<Ticket>) {
        if self.kbit == 0 {
            return (0, None);
        }
        let place = ticket
            .filter(|t| self.entries.get(t.0).is_some_and(|e| e.at != 0))
            .or_else(|| {
                let free = self
                    .entries
                    .iter()
                    .position(|e| e.at == 0 || now.saturating_sub(e.at) > EXPIRY)?;
                let e = self.entries.get_mut(free)?;
                *e = Entry::default();
                self.due = now;
                Some(Ticket(free))
            });
        let Some(place) = place else {
            return (0, None);
        };
        if let Some(e) = self.entries.get_mut(place.0) {
            // Peaks count: packets come in bursts, and a share that is too large for a moment
            // costs less than one that keeps a sender small.
            e.used = used.max(e.used.saturating_sub(e.used / 8));
            e.at = now.max(1);
        }
        if now >= self.due {
            self.divide(now);
            self.due = now.saturating_add(PERIOD);
        }
        let share = self.entries.get(place.0).map_or(0, |e| e.share);
        (share, Some(place))
    }

    /// Max-min: who leaves a quarter of his share unused and needs less than an equal part
    /// gets what he used and a quarter more (so that he can grow); what that leaves is
    /// divided among the others.
    fn divide(&mut self, now: Time) {
        let mut left = self.kbit;
        let mut hungry = 0u32;
        for e in self.entries.iter_mut() {
            if e.at == 0 || now.saturating_sub(e.at) > EXPIRY {
                e.at = 0;
                continue;
            }
            // Who uses what he has may want any amount.
            e.wants = if e.used >= e.share.saturating_sub(e.share / 4) {
                u32::MAX
            } else {
                e.used.saturating_add(e.used / 4)
            };
            e.share = 0;
            hungry = hungry.saturating_add(1);
        }
        // Each pass satisfies at least one sender or is the last; four bring the shares
        // close enough, the next period goes on from there.
        for _ in 0..4 {
            let Some(part) = left.checked_div(hungry) else {
                break;
            };
            let mut settled = 0u32;
            for e in self
                .entries
                .iter_mut()
                .filter(|e| e.at != 0 && e.share == 0)
            {
                if e.wants < part {
                    // Never less than a tenth of a part, or a new sender could not begin.
                    e.share = e.wants.max(part / 10).max(1);
                    left = left.saturating_sub(e.share);
                    settled = settled.saturating_add(1);
                }
            }
            hungry = hungry.saturating_sub(settled);
            if settled == 0 {
                break;
            }
        }
        if let Some(part) = left.checked_div(hungry) {
            for e in self
                .entries
                .iter_mut()
                .filter(|e| e.at != 0 && e.share == 0)
            {
                e.share = part.max(1);
            }
        }
    }
}
