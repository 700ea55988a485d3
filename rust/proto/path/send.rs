// SPDX-License-Identifier: GPL-2.0

//! The sending half of a path: which numbers of its epoch are outstanding, what they
//! carry, and which of them are lost.

#![forbid(unsafe_code)]

use super::bits::Bits;
use crate::os::{AllocError, Vec};
use crate::proto::api::{StreamId, Time};
use crate::proto::stream::PacketRef;
use crate::proto::wire::PathBlock;

/// Bits by which nanoseconds are shifted down to a timestamp.
const STAMP_SHIFT: u32 = 6;

/// Timestamps are compared only within this time; they repeat after 274 s.
pub(crate) const STAMP_AGE: Time = 60_000_000_000;

/// Outstanding numbers of a path at the most.
pub(crate) const OUTSTANDING_MAX: u32 = 256;

/// The content of a path number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content {
    pub(crate) stream: StreamId,
    /// Generation of the stream's slot.
    pub(crate) generation: u32,
    pub(crate) packet: PacketRef,
}

/// A number that was used and is not acknowledged yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    /// What it carries; `None` is VOID.
    pub(crate) content: Option<Content>,
    /// Timestamp of its latest transmission.
    stamp: u32,
    /// Bytes that count in the windows.
    pub(crate) len: u16,
    /// Transmissions, saturating.
    pub(crate) sent: u8,
}

/// What an acknowledgement of this path says beyond what was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acked {
    /// It acknowledges what was not sent.
    Invalid,
    /// It belongs to an earlier epoch or says less than is known.
    Old,
    /// These numbers (modulo 256) are acknowledged for the first time.
    New(Bits),
}

/// State of what is sent on a path.
pub(crate) struct SendHalf {
    pub(crate) epoch: u16,
    /// Next number.
    next: u32,
    /// Every number below is acknowledged.
    cumulative: u32,
    /// One above the highest acknowledged number.
    high: u32,
    /// Used and not acknowledged.
    unacked: Bits,
    /// Of those, known to be lost and not sent again yet.
    lost: Bits,
    /// Of the unacknowledged, sent more than once.
    resent: Bits,
    /// Of the unacknowledged, content that another path is to take over.
    donate: Bits,
    /// Latest timestamp given out.
    stamp: u32,
    /// When it was given out.
    stamped: Time,
    /// Bytes that are outstanding and neither lost nor to be donated.
    inflight: u32,
    /// Lowest acknowledgement number that is news for this path.
    ack_number: u32,
    ring: Vec<Record>,
}

impl SendHalf {
    /// A path with room for `records` outstanding packets, a power of two up to 256.
    pub(crate) fn new(epoch: u16, records: usize) -> Result<Self, AllocError> {
        Ok(Self {
            epoch,
            next: 0,
            cumulative: 0,
            high: 0,
            unacked: Bits::EMPTY,
            lost: Bits::EMPTY,
            resent: Bits::EMPTY,
            donate: Bits::EMPTY,
            stamp: 0,
            stamped: 0,
            inflight: 0,
            ack_number: 0,
            ring: Vec::from_fn(records, |_| Record::default())?,
        })
    }

    /// Begins a new epoch with nothing outstanding. What was is forgotten: take it first.
    pub(crate) fn open(&mut self, epoch: u16) {
        self.epoch = epoch;
        self.next = 0;
        self.cumulative = 0;
        self.high = 0;
        self.unacked = Bits::EMPTY;
        self.lost = Bits::EMPTY;
        self.resent = Bits::EMPTY;
        self.donate = Bits::EMPTY;
        self.inflight = 0;
    }

    /// Whether what is outstanding fits into a ring of `records`.
    pub(crate) fn fits_in(&self, records: usize) -> bool {
        let used = self.next.wrapping_sub(self.cumulative) as usize;
        records.is_power_of_two() && used <= records
    }

    /// Moves the records into another ring and leaves the old one in its place, unless they
    /// do not fit in.
    pub(crate) fn exchange(&mut self, ring: &mut Vec<Record>) {
        if !self.fits_in(ring.len()) {
            return;
        }
        let mask = ring.len().wrapping_sub(1);
        let mut at = self.cumulative;
        while at != self.next {
            if let (Some(old), Some(new)) = (self.record(at), ring.get_mut(at as usize & mask)) {
                *new = *old;
            }
            at = at.wrapping_add(1);
        }
        core::mem::swap(ring, &mut self.ring);
    }

    /// Records there are.
    pub(crate) fn records(&self) -> usize {
        self.ring.len()
    }

    /// Next number, which a probe tells.
    pub(crate) fn next(&self) -> u32 {
        self.next
    }

    /// Bytes in flight.
    pub(crate) fn inflight(&self) -> u32 {
        self.inflight
    }

    /// Outstanding numbers that carry something; counts to `most` and no further.
    pub(crate) fn carries(&self, most: u32) -> u32 {
        let mut rest = self.unacked;
        let mut n = 0u32;
        while n < most {
            let Some(i) = rest.take_lowest() else {
                break;
            };
            if self.record(i).is_some_and(|r| r.content.is_some()) {
                n = n.wrapping_add(1);
            }
        }
        n
    }

    /// Whether anything is not acknowledged.
    pub(crate) fn is_outstanding(&self) -> bool {
        !self.unacked.is_empty()
    }

    /// Whether a lost packet waits to be sent again.
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether another path is to take something over.
    pub(crate) fn has_donations(&self) -> bool {
        !self.donate.is_empty()
    }

    /// Whether a further number may be used.
    pub(crate) fn has_room(&self) -> bool {
        self.next.wrapping_sub(self.cumulative) < self.ring.len() as u32
    }

    fn slot(&self, n: u32) -> usize {
        // The ring's length is a power of two.
        n as usize & self.ring.len().wrapping_sub(1)
    }

    /// The record of number `n` (modulo 256).
    pub(crate) fn record(&self, n: u32) -> Option<&Record> {
        self.ring.get(self.slot(n))
    }

    /// A timestamp for a transmission at `now`, greater than all earlier ones of the path.
    pub(crate) fn stamp(&mut self, now: Time) -> u32 {
        let t = (now >> STAMP_SHIFT) as u32;
        let after = self.stamp.wrapping_add(1);
        // Two packets at one time do not get the same stamp. After a long silence the
        // older stamp cannot be compared any more.
        let old = now.saturating_sub(self.stamped) > STAMP_AGE;
        self.stamp = if old || (t.wrapping_sub(after) as i32) > 0 {
            t
        } else {
            after
        };
        self.stamped = now;
        self.stamp
    }

    /// The time of a timestamp that was given out within the last two minutes.
    pub(crate) fn time_of(now: Time, stamp: u32) -> Time {
        let age = ((now >> STAMP_SHIFT) as u32).wrapping_sub(stamp) as i32;
        if age >= 0 {
            now.saturating_sub((age as u64) << STAMP_SHIFT)
        } else {
            now.saturating_add(u64::from(age.unsigned_abs()) << STAMP_SHIFT)
        }
    }

    /// Uses the next number for `content`; the caller saw [`SendHalf::has_room`].
    pub(crate) fn push(&mut self, now: Time, content: Option<Content>, len: u16) -> (u32, u32) {
        let stamp = self.stamp(now);
        let sequence = self.next;
        let at = self.slot(sequence);
        if let Some(r) = self.ring.get_mut(at) {
            *r = Record {
                content,
                stamp,
                len,
                sent: 1,
            };
        }
        self.unacked.set(sequence & 255);
        self.next = sequence.wrapping_add(1);
        self.inflight = self.inflight.saturating_add(u32::from(len));
        (sequence, stamp)
    }

    /// The lost packet to be sent again first, by its full number.
    pub(crate) fn first_lost(&self) -> Option<u32> {
        let n = self.lost.first_from(self.cumulative & 255)?;
        Some(self.full(n))
    }

    /// The full number of `n` (modulo 256), which is not below the cumulative one.
    fn full(&self, n: u32) -> u32 {
        self.cumulative
            .wrapping_add(n.wrapping_sub(self.cumulative) & 255)
    }

    /// Number `sequence` is sent again. `len` is what it counts from now on. Gives the
    /// timestamp.
    pub(crate) fn resend(&mut self, now: Time, sequence: u32, len: u16, void: bool) -> u32 {
        let stamp = self.stamp(now);
        let n = sequence & 255;
        self.lost.clear(n);
        self.resent.set(n);
        let at = self.slot(sequence);
        if let Some(r) = self.ring.get_mut(at) {
            r.stamp = stamp;
            r.sent = r.sent.saturating_add(1);
            r.len = len;
            if void {
                r.content = None;
            }
        }
        self.inflight = self.inflight.saturating_add(u32::from(len));
        stamp
    }

    /// What `b` acknowledges. `number` is that of the acknowledgement.
    pub(crate) fn examine(&self, b: &PathBlock) -> Acked {
        if b.epoch != self.epoch {
            return if b.epoch.wrapping_sub(self.epoch) < 0x8000 {
                Acked::Invalid
            } else {
                Acked::Old
            };
        }
        let step = b.cumulative.wrapping_sub(self.cumulative);
        if step >= 1 << 31 {
            return Acked::Old;
        }
        let used = self.next.wrapping_sub(self.cumulative);
        let bits = Bits(b.bits);
        let above = match bits.end() {
            0 => 0,
            end => end.wrapping_add(1),
        };
        if step.saturating_add(above) > used {
            return Acked::Invalid;
        }
        let mut acked = Bits::range(self.cumulative, step);
        if above != 0 {
            acked = acked.or(bits.rotated(b.cumulative.wrapping_add(1)));
        }
        Acked::New(acked.and(self.unacked))
    }

    /// Whether acknowledgement `number` is newer for this path than all before; notes it.
    pub(crate) fn is_news(&mut self, number: u32) -> bool {
        let news = (number.wrapping_sub(self.ack_number) as i32) >= 0;
        if news {
            self.ack_number = number.wrapping_add(1);
        }
        news
    }

    /// Forgets which acknowledgements were seen (the peer counts anew).
    pub(crate) fn forget_acks(&mut self) {
        self.ack_number = 0;
    }

    /// Number `n` (modulo 256) is acknowledged: gives its record, and whether it had been
    /// in flight.
    pub(crate) fn release(&mut self, n: u32) -> Option<(Record, bool)> {
        if !self.unacked.has(n) {
            return None;
        }
        let flying = !self.lost.has(n) && !self.donate.has(n);
        self.unacked.clear(n);
        self.lost.clear(n);
        self.resent.clear(n);
        self.donate.clear(n);
        let record = *self.record(n)?;
        if flying {
            self.inflight = self.inflight.saturating_sub(u32::from(record.len));
        }
        Some((record, flying))
    }

    /// Whether the acknowledged number `n` was acknowledged for a transmission before its
    /// latest one: then resending it was wrong.
    pub(crate) fn was_spurious(&self, record: &Record, echo: u32) -> bool {
        record.sent > 1 && (echo.wrapping_sub(record.stamp) as i32) < 0
    }

    /// Moves the cumulative number to that of an examined block.
    pub(crate) fn advance(&mut self, b: &PathBlock) {
        self.cumulative = b.cumulative;
        let end = Bits(b.bits).end();
        let high = match end {
            0 => b.cumulative,
            end => b.cumulative.wrapping_add(end).wrapping_add(1),
        };
        if (high.wrapping_sub(self.high) as i32) > 0 {
            self.high = high;
        }
    }

    /// How far number `n` (modulo 256) lies below the highest acknowledged one.
    pub(crate) fn lag(&self, n: u32) -> u32 {
        self.high.wrapping_sub(1).wrapping_sub(n) & 255
    }

    /// Finds what is lost: numbers `threshold` or more below the highest acknowledged one
    /// that were sent once, and resends that are older than the timestamp `echo` by more
    /// than `slack` (in timestamp units). Gives the bytes that are no longer in flight and
    /// the number of packets.
    pub(crate) fn detect(&mut self, threshold: u32, echo: u32, slack: u32) -> (u32, u32) {
        let below = self
            .high
            .wrapping_sub(self.cumulative)
            .saturating_sub(threshold);
        let waiting = self.unacked.without(self.lost).without(self.donate);
        let mut found = Bits::EMPTY;
        if below > 0 && below <= 256 {
            found = waiting
                .without(self.resent)
                .and(Bits::range(self.cumulative, below));
        }
        if found.is_empty() && self.resent.is_empty() {
            return (0, 0);
        }
        let mut again = waiting.and(self.resent);
        while let Some(n) = again.take_lowest() {
            let older = self
                .record(n)
                .is_some_and(|r| (echo.wrapping_sub(r.stamp.wrapping_add(slack)) as i32) > 0);
            if older {
                found.set(n);
            }
        }
        self.mark_lost(found)
    }

    /// Declares lost what was sent before the probe with timestamp `stamp`, which told
    /// `next`, and is not acknowledged by the reply to it.
    pub(crate) fn detect_by_probe(&mut self, next: u32, stamp: u32) -> (u32, u32) {
        let below = next.wrapping_sub(self.cumulative);
        if below == 0 || below > 256 {
            return (0, 0);
        }
        let mut waiting = self
            .unacked
            .without(self.lost)
            .without(self.donate)
            .and(Bits::range(self.cumulative, below));
        let mut found = Bits::EMPTY;
        while let Some(n) = waiting.take_lowest() {
            if self
                .record(n)
                .is_some_and(|r| (stamp.wrapping_sub(r.stamp) as i32) > 0)
            {
                found.set(n);
            }
        }
        self.mark_lost(found)
    }

    /// Everything that waits for an acknowledgement is to be sent again.
    pub(crate) fn give_up(&mut self) {
        let waiting = self.unacked.without(self.lost).without(self.donate);
        self.mark_lost(waiting);
    }

    /// The packet with this number was not sent at all (the local queue was full).
    pub(crate) fn unsent(&mut self, sequence: u32) -> (u32, u32) {
        let n = sequence & 255;
        let mut found = Bits::EMPTY;
        if self.full(n) == sequence
            && self.unacked.has(n)
            && !self.lost.has(n)
            && !self.donate.has(n)
        {
            found.set(n);
        }
        self.mark_lost(found)
    }

    fn mark_lost(&mut self, found: Bits) -> (u32, u32) {
        let mut bytes = 0u32;
        let mut rest = found;
        while let Some(n) = rest.take_lowest() {
            bytes = bytes.saturating_add(self.record(n).map_or(0, |r| u32::from(r.len)));
        }
        self.lost = self.lost.or(found);
        self.inflight = self.inflight.saturating_sub(bytes);
        (bytes, found.len())
    }

    /// Everything outstanding is to be taken over by other paths. Gives the bytes that are
    /// no longer in flight.
    pub(crate) fn donate_all(&mut self) -> u32 {
        let bytes = self.inflight;
        self.inflight = 0;
        self.donate = Bits::EMPTY;
        let mut rest = self.unacked;
        while let Some(n) = rest.take_lowest() {
            if self.record(n).is_some_and(|r| r.content.is_some()) {
                self.donate.set(n);
            }
        }
        // What carries nothing still has to arrive, as long as the epoch lives.
        self.lost = self.unacked.without(self.donate);
        bytes
    }

    /// The path works after all: what nobody has taken over yet is sent again here.
    pub(crate) fn keep_donations(&mut self) {
        self.lost = self.lost.or(self.donate);
        self.donate = Bits::EMPTY;
    }

    /// Takes the first donation out; its number becomes VOID.
    pub(crate) fn take_donation(&mut self) -> Option<Content> {
        let n = self.donate.first_from(self.cumulative & 255)?;
        self.donate.clear(n);
        self.lost.set(n);
        let at = self.slot(n);
        self.ring.get_mut(at)?.content.take()
    }

    /// Takes the content of number `sequence`, which becomes VOID.
    pub(crate) fn take(&mut self, sequence: u32) -> Option<Content> {
        let n = sequence & 255;
        if !self.unacked.has(n) || self.full(n) != sequence {
            return None;
        }
        let at = self.slot(n);
        self.ring.get_mut(at)?.content.take()
    }

    /// Whether resends are outstanding.
    pub(crate) fn was_resending(&self) -> bool {
        !self.resent.is_empty()
    }

    /// Makes every number of this stream VOID.
    pub(crate) fn forget_stream(&mut self, stream: StreamId) {
        for r in self.ring.iter_mut() {
            if r.content.is_some_and(|c| c.stream == stream) {
                r.content = None;
            }
        }
        self.lost = self.lost.or(self.donate);
        let mut kept = Bits::EMPTY;
        let mut rest = self.donate;
        while let Some(n) = rest.take_lowest() {
            if self.record(n).is_some_and(|r| r.content.is_some()) {
                kept.set(n);
            }
        }
        self.donate = kept;
        self.lost = self.lost.without(kept);
    }
}

#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests {
    use super::*;

    #[cfg_attr(test, test)]
    pub(crate) fn memory_as_stated() {
        assert!(core::mem::size_of::<Record>() <= 32);
    }

    fn half(records: usize) -> SendHalf {
        SendHalf::new(7, records).expect("memory")
    }

    fn block(cumulative: u32, bits: u64, echo: u32) -> PathBlock {
        PathBlock {
            epoch: 7,
            cumulative,
            bits: [bits, 0, 0, 0],
            echo,
            ..PathBlock::default()
        }
    }

    fn take(s: &mut SendHalf, b: &PathBlock) -> u32 {
        let Acked::New(mut newly) = s.examine(b) else {
            panic!("old or invalid")
        };
        s.advance(b);
        let mut n = 0;
        while let Some(i) = newly.take_lowest() {
            assert!(s.release(i).is_some());
            n += 1;
        }
        n
    }

    #[cfg_attr(test, test)]
    pub(crate) fn a_gap_is_loss_and_a_lost_resend_is_seen() {
        let mut s = half(64);
        let stamps = [0; 6].map(|_| s.push(1_000_000, None, 100).1);
        assert!(stamps.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(s.inflight(), 600);
        // 1 is missing, 0 and 2 are there.
        assert_eq!(take(&mut s, &block(1, 0b1, stamps[2])), 2);
        assert_eq!(s.detect(1, stamps[2], 0), (100, 1));
        assert_eq!(s.first_lost(), Some(1));
        assert_eq!(s.inflight(), 300);
        let again = s.resend(1_000_000, 1, 100, false);
        assert!(!s.has_lost());
        // 3 and 4 arrive: they were sent before the resend.
        assert_eq!(take(&mut s, &block(1, 0b111, stamps[4])), 2);
        assert_eq!(s.detect(1, stamps[4], 0), (0, 0));
        // Something newer than the resend arrives: lost again.
        let (n, newer) = s.push(1_000_000, None, 100);
        assert_eq!((n, newer > again), (6, true));
        assert_eq!(take(&mut s, &block(1, 0b11111, newer)), 2);
        assert_eq!(s.detect(1, newer, 0), (100, 1));
        s.resend(2_000_000, 1, 100, false);
        assert_eq!(take(&mut s, &block(7, 0, newer)), 1);
        assert!(!s.is_outstanding());
        assert_eq!(s.inflight(), 0);
    }

    #[cfg_attr(test, test)]
    pub(crate) fn thresholds_and_spurious_resends() {
        let mut s = half(64);
        let stamps = [0; 10].map(|_| s.push(5_000_000, None, 10).1);
        assert_eq!(take(&mut s, &block(0, 0b11, stamps[2])), 2);
        assert_eq!(
            s.detect(3, stamps[2], 0),
            (0, 0),
            "two above, three are needed"
        );
        assert_eq!(take(&mut s, &block(0, 0b111, stamps[3])), 1);
        assert_eq!(s.detect(3, stamps[3], 0), (10, 1));
        s.resend(6_000_000, 0, 10, false);
        let b = block(4, 0, stamps[3]);
        assert!(matches!(s.examine(&b), Acked::New(_)));
        s.advance(&b);
        assert_eq!(s.lag(0), 3);
        let (record, _) = s.release(0).expect("outstanding");
        assert!(s.was_spurious(&record, stamps[3]));
    }

    #[cfg_attr(test, test)]
    pub(crate) fn what_was_not_sent_cannot_be_acknowledged() {
        let mut s = half(64);
        s.push(0, None, 1);
        s.push(0, None, 1);
        assert_eq!(s.examine(&block(3, 0, 0)), Acked::Invalid);
        assert_eq!(s.examine(&block(0, 0b10, 0)), Acked::Invalid);
        assert_eq!(take(&mut s, &block(2, 0, 0)), 2);
        assert_eq!(s.examine(&block(1, 0, 0)), Acked::Old);
        let mut b = block(2, 0, 0);
        b.epoch = 8;
        assert_eq!(s.examine(&b), Acked::Invalid);
        b.epoch = 6;
        assert_eq!(s.examine(&b), Acked::Old);
    }

    #[cfg_attr(test, test)]
    pub(crate) fn rings_change_with_packets_in_flight() {
        let mut s = half(16);
        for i in 0..12 {
            s.push(0, None, i);
        }
        take(&mut s, &block(12, 0, 0));
        for i in 0..16 {
            assert!(s.has_room());
            s.push(0, None, 100 + i);
        }
        assert!(!s.has_room());
        let mut ring = Vec::from_fn(64, |_| Record::default()).expect("memory");
        s.exchange(&mut ring);
        assert_eq!((ring.len(), s.records()), (16, 64));
        assert!(s.has_room());
        for i in 0..16u32 {
            let r = s.record((12 + i) & 255).expect("there");
            assert_eq!(u32::from(r.len), 100 + i);
        }
        // Back, but not while more is outstanding than fits in.
        s.push(0, None, 116);
        s.exchange(&mut ring);
        assert_eq!((ring.len(), s.records()), (16, 64));
        take(&mut s, &block(25, 0, 0));
        s.exchange(&mut ring);
        assert_eq!((ring.len(), s.records()), (64, 16));
        for n in 25..29u32 {
            let r = s.record(n).expect("there");
            assert_eq!(u32::from(r.len), 100 + n - 12);
        }
        for _ in 0..12 {
            assert!(s.has_room());
            s.push(0, None, 1);
        }
        assert!(!s.has_room());
    }

    #[cfg_attr(test, test)]
    pub(crate) fn stamps_go_on_after_silence() {
        let mut s = half(16);
        let a = s.stamp(1_000);
        let b = s.stamp(1_000);
        assert_eq!(b, a.wrapping_add(1));
        // Longer than stamps can be compared.
        let now = 200 * 1_000_000_000;
        let c = s.stamp(now);
        assert_eq!(SendHalf::time_of(now + 64_000, c), now);
    }
}
