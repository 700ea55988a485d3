// SPDX-License-Identifier: GPL-2.0

//! Packets of Writes that wait until everything up to some sequence is in place: final
//! packets and those of overlapping Writes ("Holding"). The driver keeps their
//! bytes; here is what names them. A fixed table; each record is in exactly one list.

#![forbid(unsafe_code)]

use super::before;
use crate::os::{AllocError, Vec};

/// Records of a stream.
const RECORDS: usize = 128;

const NIL: u16 = u16::MAX;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Free,
    /// In the chain of the number that it waits for.
    Waiting,
    Ready,
    Discard,
}

/// A held packet.
#[derive(Clone, Copy, Default)]
pub(super) struct Record {
    pub(super) sseq: u32,
    pub(super) msn: u32,
    pub(super) va: u64,
    pub(super) rkey: u32,
    pub(super) offset: u32,
    pub(super) len: u32,
    pub(super) total: u32,
    pub(super) last: bool,
    /// It may be copied when everything below this number is in place.
    pub(super) release_at: u32,
}

#[derive(Clone, Copy, Default)]
struct Node {
    record: Record,
    place: Place,
    prev: u16,
    next: u16,
}

#[derive(Clone, Copy)]
struct List {
    head: u16,
    tail: u16,
}

const EMPTY: List = List {
    head: NIL,
    tail: NIL,
};

pub(super) struct Held {
    records: Vec<Node>,
    /// Waiting records by the low bits of `release_at`.
    chains: Vec<List>,
    free: List,
    ready: List,
    discard: List,
    waiting: usize,
}

impl Held {
    /// Bytes of its tables.
    pub(super) const MEMORY: usize =
        RECORDS * (core::mem::size_of::<Node>() + core::mem::size_of::<List>());

    pub(super) fn new() -> Result<Self, AllocError> {
        let mut held = Self {
            records: Vec::from_fn(RECORDS, |_| Node::default())?,
            chains: Vec::from_fn(RECORDS, |_| EMPTY)?,
            free: EMPTY,
            ready: EMPTY,
            discard: EMPTY,
            waiting: 0,
        };
        held.reset();
        Ok(held)
    }

    pub(super) fn reset(&mut self) {
        self.chains.fill(EMPTY);
        self.free = EMPTY;
        self.ready = EMPTY;
        self.discard = EMPTY;
        self.waiting = 0;
        for slot in 0..RECORDS as u16 {
            self.append(slot, Place::Free);
        }
    }

    fn list(&mut self, place: Place, release_at: u32) -> Option<&mut List> {
        match place {
            Place::Free => Some(&mut self.free),
            Place::Ready => Some(&mut self.ready),
            Place::Discard => Some(&mut self.discard),
            Place::Waiting => self.chains.get_mut(release_at as usize % RECORDS),
        }
    }

    fn append(&mut self, slot: u16, place: Place) {
        let Some(release_at) = self
            .records
            .get(usize::from(slot))
            .map(|n| n.record.release_at)
        else {
            return;
        };
        let Some(list) = self.list(place, release_at) else {
            return;
        };
        let tail = list.tail;
        list.tail = slot;
        if list.head == NIL {
            list.head = slot;
        }
        if let Some(r) = self.records.get_mut(usize::from(tail)) {
            r.next = slot;
        }
        if let Some(r) = self.records.get_mut(usize::from(slot)) {
            r.place = place;
            r.prev = tail;
            r.next = NIL;
        }
        if place == Place::Waiting {
            self.waiting += 1;
        }
    }

    fn unlink(&mut self, slot: u16) {
        let Some(r) = self.records.get(usize::from(slot)).copied() else {
            return;
        };
        if let Some(p) = self.records.get_mut(usize::from(r.prev)) {
            p.next = r.next;
        }
        if let Some(n) = self.records.get_mut(usize::from(r.next)) {
            n.prev = r.prev;
        }
        if let Some(list) = self.list(r.place, r.record.release_at) {
            if list.head == slot {
                list.head = r.next;
            }
            if list.tail == slot {
                list.tail = r.prev;
            }
        }
        if r.place == Place::Waiting {
            self.waiting -= 1;
        }
    }

    fn pop(&mut self, place: Place) -> Option<(u16, Record)> {
        let slot = self.list(place, 0)?.head;
        let record = self.records.get(usize::from(slot))?.record;
        self.unlink(slot);
        self.append(slot, Place::Free);
        Some((slot, record))
    }

    pub(super) fn has_room(&self) -> bool {
        self.free.head != NIL
    }

    /// Whether no record waits for its turn.
    pub(super) fn none_waiting(&self) -> bool {
        self.waiting == 0
    }

    /// Adds a record that waits for `record.release_at` and returns its place.
    pub(super) fn insert(&mut self, record: Record) -> Option<u16> {
        let slot = self.free.head;
        if slot == NIL {
            return None;
        }
        self.unlink(slot);
        if let Some(r) = self.records.get_mut(usize::from(slot)) {
            r.record = record;
        }
        self.append(slot, Place::Waiting);
        Some(slot)
    }

    /// Everything below `done` is in place; called for each number in turn.
    pub(super) fn release(&mut self, done: u32) {
        let Some(list) = self.list(Place::Waiting, done) else {
            return;
        };
        let mut slot = list.head;
        while let Some(r) = self.records.get(usize::from(slot)).copied() {
            if r.record.release_at == done {
                self.unlink(slot);
                self.append(slot, Place::Ready);
            }
            slot = r.next;
        }
    }

    /// Packet `sseq` was copied; its record goes if it is still there.
    pub(super) fn remove(&mut self, slot: u16, sseq: u32) {
        if let Some(r) = self.records.get(usize::from(slot)) {
            if r.record.sseq == sseq && r.place != Place::Free {
                self.unlink(slot);
                self.append(slot, Place::Free);
            }
        }
    }

    /// Nothing of message `msn` and those after it is to be copied any more.
    pub(super) fn discard_from(&mut self, msn: u32) {
        self.discard_where(|r| !before(r.msn, msn), |_| {});
    }

    /// Nothing is to be copied any more.
    pub(super) fn discard_all(&mut self) {
        self.discard_each(|_| {});
    }

    /// The same, and says what it was.
    pub(super) fn discard_each(&mut self, each: impl FnMut(&Record)) {
        self.discard_where(|_| true, each);
    }

    fn discard_where(&mut self, which: impl Fn(&Record) -> bool, mut each: impl FnMut(&Record)) {
        for slot in 0..RECORDS as u16 {
            let Some(r) = self.records.get(usize::from(slot)) else {
                return;
            };
            if matches!(r.place, Place::Waiting | Place::Ready) && which(&r.record) {
                each(&r.record);
                self.unlink(slot);
                self.append(slot, Place::Discard);
            }
        }
    }

    /// A packet whose time has come.
    pub(super) fn pop_ready(&mut self) -> Option<(u16, Record)> {
        self.pop(Place::Ready)
    }

    /// A packet to be dropped.
    pub(super) fn pop_discard(&mut self) -> Option<(u16, Record)> {
        self.pop(Place::Discard)
    }
}
