// SPDX-License-Identifier: GPL-2.0

//! The streams of a connection: slots, the way from a QP number to a slot, and the lists
//! that make the cost of a packet independent of the number of idle QPs.

#![forbid(unsafe_code)]

use crate::os::{AllocError, Box, Vec};
use crate::proto::api::{StreamId, Time};
use crate::proto::stream::Stream;

/// No slot.
pub(super) const NIL: u32 = u32::MAX;

/// Lists that a slot can be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum List {
    /// Has packets to send.
    Send = 0,
    /// May have events.
    Event,
    /// Has a block to send.
    Dirty,
    /// Has a timer.
    Timer,
    /// Has a query to send.
    Query,
}

const LISTS: usize = 5;

/// A stream's place.
pub(super) struct Slot {
    pub(super) stream: Option<Box<Stream>>,
    /// Counts the streams that were here.
    pub(super) generation: u32,
    pub(super) qpn: u32,
    pub(super) remote_qpn: u32,
    /// Lists that it is on, a bit each.
    on: u8,
    next: [u32; LISTS],
    /// Next slot of the same bucket, or next free one.
    chain: u32,
    /// Bytes it may send before it is the next one's turn.
    pub(super) deficit: u32,
    /// Blocks to send: requests, responses.
    pub(super) dirty: [bool; 2],
    /// Lowest acknowledgement number that is news: about requests, about responses.
    pub(super) ack_number: [u32; 2],
    /// Queries sent since the stream was last busy: about requests, about responses.
    pub(super) queries: [u8; 2],
    pub(super) query: [bool; 2],
    pub(super) queried: Time,
    /// The peer's QP has answered in this life of the peer.
    pub(super) heard: bool,
}

/// Bytes of a stream's place, without the stream.
#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(super) const SLOT_BYTES: usize = core::mem::size_of::<Slot>();

impl Slot {
    fn empty() -> Self {
        Self {
            stream: None,
            generation: 0,
            qpn: 0,
            remote_qpn: 0,
            on: 0,
            next: [NIL; LISTS],
            chain: NIL,
            deficit: 0,
            dirty: [false; 2],
            ack_number: [0; 2],
            queries: [0; 2],
            query: [false; 2],
            queried: 0,
            heard: false,
        }
    }
}

/// Which of `buckets` (at most 2^32) a QP number belongs to. The numbers of one connection lie at
/// any even distance from one another when a program takes its peers in turn.
fn bucket(qpn: u32, buckets: usize) -> usize {
    // Multiplications by odd numbers with bits all over, the upper half folded in between.
    let mixed = qpn.wrapping_mul(0x9e37_79b1);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b);
    (u64::from(mixed).wrapping_mul(buckets as u64) >> 32) as usize
}

#[derive(Clone, Copy)]
struct Fifo {
    head: u32,
    tail: u32,
}

/// Memory for a greater number of streams; also what is left over when it was not needed.
/// Made and dropped outside the connection's lock.
pub struct Spare {
    slots: Vec<Slot>,
    buckets: Vec<u32>,
}

impl Spare {
    /// Memory for `streams` streams; none for 0.
    pub(super) fn new(streams: usize) -> Result<Self, AllocError> {
        let n = match streams {
            0 => 0,
            n => n.max(4).next_power_of_two(),
        };
        Ok(Self {
            slots: Vec::from_fn(n, |_| Slot::empty())?,
            buckets: Vec::from_fn(n, |_| NIL)?,
        })
    }

    /// Streams that it is memory for.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }
}

/// All streams.
pub(super) struct Streams {
    slots: Vec<Slot>,
    buckets: Vec<u32>,
    /// Slots below this have been used.
    used: u32,
    free: u32,
    count: u32,
    lists: [Fifo; LISTS],
}

impl Streams {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            buckets: Vec::new(),
            used: 0,
            free: NIL,
            count: 0,
            lists: [Fifo {
                head: NIL,
                tail: NIL,
            }; LISTS],
        }
    }

    /// Streams there are.
    pub(super) fn len(&self) -> usize {
        self.count as usize
    }

    /// Slots that have been used: the next stream gets one of these or the one after.
    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    fn bucket(&self, qpn: u32) -> usize {
        bucket(qpn, self.buckets.len())
    }

    pub(super) fn slot(&self, i: u32) -> Option<&Slot> {
        self.slots.get(i as usize)
    }

    pub(super) fn slot_mut(&mut self, i: u32) -> Option<&mut Slot> {
        self.slots.get_mut(i as usize)
    }

    pub(super) fn stream_mut(&mut self, i: u32) -> Option<&mut Stream> {
        self.slots.get_mut(i as usize)?.stream.as_deref_mut()
    }

    /// Stream `i` if it is still that of `generation`.
    pub(super) fn stream_of(&mut self, i: u32, generation: u32) -> Option<&mut Stream> {
        let s = self.slots.get_mut(i as usize)?;
        if s.generation != generation {
            return None;
        }
        s.stream.as_deref_mut()
    }

    /// For how many streams there has to be memory before one more can be put in; 0 is "there
    /// is enough".
    pub(super) fn wanted(&self) -> usize {
        if self.free != NIL || self.used() < self.slots.len() {
            0
        } else {
            self.used().saturating_add(1)
        }
    }

    /// Puts a stream in. `spare` is memory for [`Streams::wanted`] streams; gives back what is
    /// not needed.
    pub(super) fn insert(
        &mut self,
        mut stream: Box<Stream>,
        mut spare: Spare,
    ) -> Result<(StreamId, Spare), (Box<Stream>, Spare)> {
        if self.wanted() != 0 {
            if spare.slots.len() <= self.slots.len() {
                return Err((stream, spare));
            }
            for (new, old) in spare.slots.iter_mut().zip(self.slots.iter_mut()) {
                core::mem::swap(new, old);
            }
            core::mem::swap(&mut spare.slots, &mut self.slots);
            core::mem::swap(&mut spare.buckets, &mut self.buckets);
            for b in self.buckets.iter_mut() {
                *b = NIL;
            }
            for i in 0..self.used {
                if self.slot(i).is_some_and(|s| s.stream.is_some()) {
                    self.link(i);
                }
            }
        }
        let i = if self.free != NIL {
            let i = self.free;
            self.free = self.slot(i).map_or(NIL, |s| s.chain);
            i
        } else {
            let i = self.used;
            self.used = self.used.wrapping_add(1);
            i
        };
        let Some(slot) = self.slots.get_mut(i as usize) else {
            return Err((stream, spare));
        };
        slot.generation = slot.generation.wrapping_add(1);
        stream.set_identity(StreamId(i), slot.generation);
        let attr = stream.attr();
        slot.qpn = attr.local_qpn;
        slot.remote_qpn = attr.remote_qpn;
        slot.deficit = 0;
        slot.dirty = [false; 2];
        slot.ack_number = [0; 2];
        slot.queries = [0; 2];
        slot.query = [false; 2];
        slot.heard = false;
        slot.stream = Some(stream);
        self.count = self.count.wrapping_add(1);
        self.link(i);
        Ok((StreamId(i), spare))
    }

    fn link(&mut self, i: u32) {
        let Some(qpn) = self.slot(i).map(|s| s.qpn) else {
            return;
        };
        let at = self.bucket(qpn);
        let Some(b) = self.buckets.get_mut(at) else {
            return;
        };
        let old = core::mem::replace(b, i);
        if let Some(s) = self.slot_mut(i) {
            s.chain = old;
        }
    }

    fn unlink(&mut self, i: u32) {
        let Some((qpn, chain)) = self.slot(i).map(|s| (s.qpn, s.chain)) else {
            return;
        };
        let at = self.bucket(qpn);
        let Some(b) = self.buckets.get_mut(at) else {
            return;
        };
        if *b == i {
            *b = chain;
            return;
        }
        let mut at = *b;
        while let Some(s) = self.slots.get_mut(at as usize) {
            if s.chain == i {
                s.chain = chain;
                return;
            }
            at = s.chain;
        }
    }

    /// Takes a stream out. Its slot stays on the lists until its turn comes there.
    pub(super) fn remove(&mut self, id: StreamId) -> Option<Box<Stream>> {
        self.slot(id.0)?.stream.as_ref()?;
        self.unlink(id.0);
        let free = self.free;
        let slot = self.slot_mut(id.0)?;
        let stream = slot.stream.take();
        slot.chain = free;
        self.free = id.0;
        self.count = self.count.wrapping_sub(1);
        stream
    }

    /// The slot of the QP `qpn` that is connected with `remote`.
    pub(super) fn find(&self, qpn: u32, remote: u32) -> Option<u32> {
        let mut i = *self.buckets.get(self.bucket(qpn))?;
        while let Some(s) = self.slot(i) {
            if s.qpn == qpn {
                return (s.remote_qpn == remote).then_some(i);
            }
            i = s.chain;
        }
        None
    }

    /// Whether slot `i` is on a list.
    pub(super) fn is_on(&self, list: List, i: u32) -> bool {
        self.slot(i)
            .is_some_and(|s| s.on & 1u8 << (list as usize) != 0)
    }

    /// Appends slot `i` to a list, unless it is on it. Returns whether it was not.
    pub(super) fn enlist(&mut self, list: List, i: u32) -> bool {
        let at = list as usize;
        let bit = 1u8 << at;
        let Some(slot) = self.slots.get_mut(i as usize) else {
            return false;
        };
        if slot.on & bit != 0 {
            return false;
        }
        slot.on |= bit;
        if let Some(n) = slot.next.get_mut(at) {
            *n = NIL;
        }
        let Some(fifo) = self.lists.get_mut(at) else {
            return false;
        };
        let tail = core::mem::replace(&mut fifo.tail, i);
        if tail == NIL {
            fifo.head = i;
        } else if let Some(n) = self
            .slots
            .get_mut(tail as usize)
            .and_then(|s| s.next.get_mut(at))
        {
            *n = i;
        }
        true
    }

    /// First slot of a list.
    pub(super) fn first(&self, list: List) -> Option<u32> {
        let head = self.lists.get(list as usize)?.head;
        (head != NIL).then_some(head)
    }

    /// Removes the first slot of a list.
    pub(super) fn delist(&mut self, list: List) -> Option<u32> {
        let at = list as usize;
        let fifo = self.lists.get_mut(at)?;
        let head = fifo.head;
        let slot = self.slots.get_mut(head as usize)?;
        slot.on &= !(1u8 << at);
        fifo.head = *slot.next.get(at)?;
        if fifo.head == NIL {
            fifo.tail = NIL;
        }
        Some(head)
    }

    /// Whether a list has only the slot `i`, or none.
    pub(super) fn alone(&self, list: List) -> bool {
        self.lists
            .get(list as usize)
            .is_none_or(|f| f.head == f.tail)
    }

    /// Number of slots on a list at the most (for bounded walks).
    pub(super) fn bound(&self) -> usize {
        self.used()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::bucket;

    /// Whatever way QP numbers come to a connection in, and however many, the slot of a packet's QP
    /// is found in as many steps.
    #[test]
    fn a_qp_among_4096_is_found_as_soon() {
        for count in [1usize, 25, 32, 512, 4096] {
            let buckets = count.max(4).next_power_of_two();
            for distance in (1..200).chain([256, 500, 1000, 1024, 2016, 4000, 4032, 4096]) {
                let mut load = std::vec![0u32; buckets];
                let mut steps = 0;
                for i in 0..count as u32 {
                    let qpn = (70_000 + i * distance) & 0xff_ffff;
                    let at = &mut load[bucket(qpn, buckets)];
                    *at += 1;
                    steps += *at;
                }
                let most = load.iter().max().copied().unwrap_or(0);
                assert!(most <= 10, "{most} of {count} at {distance} in one bucket");
                assert!(
                    steps as usize <= count * 2,
                    "{steps} steps to {count} at {distance}"
                );
            }
        }
    }
}
