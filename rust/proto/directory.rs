// SPDX-License-Identifier: GPL-2.0

//! The connections of a device: by the id that packets carry, and by the ends that a packet of
//! the handshake names.
//!
//! Neither way costs more with many connections than with one. Anybody can send packets of the
//! handshake, and local programs choose the addresses that they connect to: the hash is keyed, so
//! that nobody can choose ends that fall into one bucket.

#![forbid(unsafe_code)]

use super::connection::{gid_words, keyed_hash};
use super::wire::HandshakeKey;
use crate::os::{AllocError, Vec};

/// Bits of a connection's id that are its place in the directory; the others are random.
pub const INDEX_BITS: u32 = 24;

/// These bits.
pub const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

/// Places of the first memory.
const PLACES_MIN: usize = 16;

/// No place.
const NIL: u32 = u32::MAX;

/// In place of the next one: the place is taken, but nothing is there yet.
const RESERVED: u32 = u32::MAX - 1;

/// What a connection is found by: two endpoints and a traffic class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// GID of the local end.
    pub local: [u8; 16],
    /// GID of the remote end.
    pub remote: [u8; 16],
    /// Differentiated services code point, 6 bits.
    pub dscp: u8,
}

impl From<HandshakeKey> for Key {
    /// As the receiver of the packet sees it.
    fn from(key: HandshakeKey) -> Self {
        Self {
            local: key.destination,
            remote: key.source,
            dscp: key.dscp,
        }
    }
}

/// What can be in a directory.
pub trait Named {
    /// Its id; [`INDEX_BITS`] of it are what [`Directory::reserve`] gave.
    fn id(&self) -> u64;
    /// Its ends, which no other one has.
    fn key(&self) -> &Key;
}

struct Place<T> {
    value: Option<T>,
    /// Of the value's key.
    hash: u32,
    /// Next place of the same bucket, or next free one.
    next: u32,
}

/// Memory for more connections; also what is left over. Made and dropped outside the lock.
pub struct Room<T> {
    places: Vec<Place<T>>,
    buckets: Vec<u32>,
}

impl<T> Room<T> {
    /// Memory for twice as many as `places`.
    pub fn beyond(places: usize) -> Result<Self, AllocError> {
        let n = places.saturating_mul(2).max(PLACES_MIN).next_power_of_two();
        Ok(Self {
            places: Vec::from_fn(n, |_| Place {
                value: None,
                hash: 0,
                next: NIL,
            })?,
            buckets: Vec::from_fn(n, |_| NIL)?,
        })
    }
}

/// The connections of a device.
pub struct Directory<T> {
    places: Vec<Place<T>>,
    /// First place of each; as many as there are places, a power of two.
    buckets: Vec<u32>,
    free: u32,
    /// Nobody else knows it.
    hash_key: [u8; 16],
}

impl<T: Named> Directory<T> {
    /// An empty one without memory. `hash_key` is random.
    pub const fn new(hash_key: [u8; 16]) -> Self {
        Self {
            places: Vec::new(),
            buckets: Vec::new(),
            free: NIL,
            hash_key,
        }
    }

    fn hash(&self, key: &Key) -> u32 {
        let ([l0, l1], [r0, r1]) = (gid_words(&key.local), gid_words(&key.remote));
        keyed_hash(&self.hash_key, &[l0, l1, r0, r1, u64::from(key.dscp)]) as u32
    }

    fn bucket(&self, hash: u32) -> usize {
        hash as usize & self.buckets.len().wrapping_sub(1)
    }

    /// The connection with this id.
    pub fn by_id(&self, id: u64) -> Option<&T> {
        let value = self.at((id & INDEX_MASK) as usize)?;
        (value.id() == id).then_some(value)
    }

    /// The connection between these ends.
    pub fn by_key(&self, key: &Key) -> Option<&T> {
        let hash = self.hash(key);
        self.chain(hash)
            .filter(|place| place.hash == hash)
            .find_map(|place| place.value.as_ref().filter(|v| v.key() == key))
    }

    /// The places of a bucket.
    fn chain(&self, hash: u32) -> impl Iterator<Item = &Place<T>> + '_ {
        let place = |i: u32| self.places.get(i as usize);
        let first = self.buckets.get(self.bucket(hash)).copied().unwrap_or(NIL);
        core::iter::successors(place(first), move |p| place(p.next))
    }

    /// Places, taken or not.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// The connection in place `i`.
    pub fn at(&self, i: usize) -> Option<&T> {
        self.places.get(i)?.value.as_ref()
    }

    /// Takes a place, for [`Directory::insert`] or [`Directory::give_back`]. `None`: there is no
    /// room; see [`Directory::grow`].
    pub fn reserve(&mut self) -> Option<u32> {
        let i = self.free;
        let place = self.places.get_mut(i as usize)?;
        self.free = core::mem::replace(&mut place.next, RESERVED);
        Some(i)
    }

    /// Gives a place back in which nothing was put.
    pub fn give_back(&mut self, i: u32) {
        if let Some(place) = self.places.get_mut(i as usize) {
            if place.next == RESERVED && place.value.is_none() {
                place.next = core::mem::replace(&mut self.free, i);
            }
        }
    }

    /// Uses `room`, if that is for more than there are now; returns memory that is not needed.
    pub fn grow(&mut self, mut room: Room<T>) -> Room<T> {
        if room.places.len() <= self.places.len() {
            return room;
        }
        for (new, old) in room.places.iter_mut().zip(self.places.iter_mut()) {
            core::mem::swap(new, old);
        }
        core::mem::swap(&mut room.places, &mut self.places);
        core::mem::swap(&mut room.buckets, &mut self.buckets);
        self.free = NIL;
        // From the end, so that low places are used first.
        for i in (0..self.places.len() as u32).rev() {
            match self.places.get_mut(i as usize) {
                Some(place) if place.value.is_some() => self.link(i),
                Some(place) if place.next != RESERVED => {
                    place.next = core::mem::replace(&mut self.free, i);
                }
                _ => {}
            }
        }
        room
    }

    /// Puts a connection into the place that was reserved for it, and hands it back when none
    /// was.
    pub fn insert(&mut self, value: T) -> Result<(), T> {
        let i = (value.id() & INDEX_MASK) as u32;
        let hash = self.hash(value.key());
        match self.places.get_mut(i as usize) {
            Some(place) if place.next == RESERVED && place.value.is_none() => {
                place.value = Some(value);
                place.hash = hash;
            }
            _ => return Err(value),
        }
        self.link(i);
        Ok(())
    }

    /// Takes the connection with this id out.
    pub fn remove(&mut self, id: u64) -> Option<T> {
        self.by_id(id)?;
        self.take((id & INDEX_MASK) as u32)
    }

    /// Takes the first connection out whose place is `from` or above. There is none below what
    /// `from` is afterwards, when there was none below it.
    pub fn take_from(&mut self, from: &mut usize) -> Option<T> {
        let rest = self.places.get(*from..)?;
        *from += rest
            .iter()
            .position(|p| p.value.is_some())
            .unwrap_or(rest.len());
        self.take(*from as u32)
    }

    fn take(&mut self, i: u32) -> Option<T> {
        self.places.get(i as usize)?.value.as_ref()?;
        self.unlink(i);
        let place = self.places.get_mut(i as usize)?;
        place.next = core::mem::replace(&mut self.free, i);
        place.value.take()
    }

    /// Puts place `i` into its bucket.
    fn link(&mut self, i: u32) {
        let Some(hash) = self.places.get(i as usize).map(|p| p.hash) else {
            return;
        };
        let at = self.bucket(hash);
        let Some(first) = self.buckets.get_mut(at) else {
            return;
        };
        let old = core::mem::replace(first, i);
        if let Some(place) = self.places.get_mut(i as usize) {
            place.next = old;
        }
    }

    /// Takes place `i` out of its bucket.
    fn unlink(&mut self, i: u32) {
        let Some((hash, next)) = self.places.get(i as usize).map(|p| (p.hash, p.next)) else {
            return;
        };
        let at = self.bucket(hash);
        let Some(first) = self.buckets.get_mut(at) else {
            return;
        };
        if *first == i {
            *first = next;
            return;
        }
        let mut before = *first;
        while let Some(place) = self.places.get_mut(before as usize) {
            if place.next == i {
                place.next = next;
                return;
            }
            before = place.next;
        }
    }
}

#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests {
    use super::*;

    /// Stands for a connection.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Entry {
        id: u64,
        key: Key,
    }

    impl Named for Entry {
        fn id(&self) -> u64 {
            self.id
        }
        fn key(&self) -> &Key {
            &self.key
        }
    }

    fn random(mut x: u64) -> impl FnMut() -> u64 {
        move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        }
    }

    /// The ends 10.95.0.1 and 10.x.y.z, `n` being x.y.z: as near to each other as those of a
    /// real cluster.
    fn key(n: u32) -> Key {
        let mapped = |host: u32| {
            let mut gid = [0; 16];
            let [_, b, c, d] = host.to_be_bytes();
            for (to, from) in gid.iter_mut().rev().zip([d, c, b, 10, 0xff, 0xff]) {
                *to = from;
            }
            gid
        };
        Key {
            local: mapped(0x5f_0001),
            remote: mapped(n),
            dscp: (n >> 24) as u8 & 63,
        }
    }

    fn directory() -> Directory<Entry> {
        Directory::new(*b"nobody knows it.")
    }

    /// As the driver makes a connection.
    fn add(d: &mut Directory<Entry>, random: u64, key: Key) -> Entry {
        let place = d.reserve().unwrap_or_else(|| {
            let room = Room::beyond(d.places()).expect("memory");
            drop(d.grow(room));
            d.reserve().expect("there is room now")
        });
        let entry = Entry {
            id: random & !INDEX_MASK | u64::from(place),
            key,
        };
        d.insert(entry).expect("the place is reserved");
        entry
    }

    #[cfg_attr(test, test)]
    pub(crate) fn against_a_list() {
        for seed in 1..=8 {
            let mut next = random(seed);
            let mut d = directory();
            let mut list: Vec<Entry> = Vec::with_capacity(256).expect("memory");
            let mut gone = None;
            for step in 0..4000 {
                // It grows to some 200, shrinks, and grows again.
                let growing = step / 500 % 2 == 0;
                let n = next();
                let k = key(n as u32 % 400);
                let known = list.iter().find(|e| e.key == k).copied();
                assert_eq!(d.by_key(&k).copied(), known, "seed {seed}, step {step}");
                match known {
                    None if growing && list.len() < list.capacity() => {
                        let entry = add(&mut d, next(), k);
                        list.push(entry).expect("within capacity");
                    }
                    Some(entry) if !growing || n >> 62 == 0 => {
                        assert_eq!(d.remove(entry.id), Some(entry), "seed {seed}, step {step}");
                        let last = list.pop().expect("it is in it");
                        if let Some(slot) = list.iter_mut().find(|e| **e == entry) {
                            *slot = last;
                        }
                        gone = Some(entry.id);
                    }
                    _ => {}
                }
                for entry in list.iter().rev().take(8) {
                    assert_eq!(d.by_id(entry.id), Some(entry), "seed {seed}, step {step}");
                }
                assert!(gone.is_none_or(|id| d.by_id(id).is_none() && d.remove(id).is_none()));
            }
            let mut there = (0..d.places()).filter_map(|i| d.at(i));
            assert!(there.all(|e| list.iter().any(|l| l == e)), "seed {seed}");
            let (mut from, mut taken) = (0, 0);
            while let Some(entry) = d.take_from(&mut from) {
                assert!(list.contains(&entry), "seed {seed}");
                taken += 1;
            }
            assert_eq!(taken, list.len(), "seed {seed}");
        }
    }

    /// A stranger's packet, and a peer's, is not looked up for longer among 4,000 connections.
    #[cfg_attr(test, test)]
    pub(crate) fn a_lookup_among_4000_is_no_longer() {
        // Places that are looked at for a key: the most, and all together.
        let looked = |d: &Directory<Entry>, from: u32, n: u32| {
            let steps = |i| d.chain(d.hash(&key(from + i))).count();
            let most = (0..n).map(steps).max().unwrap_or(0);
            (most, (0..n).map(steps).sum::<usize>())
        };
        let mut next = random(77);
        let mut d = directory();
        assert_eq!(looked(&d, 0, 100), (0, 0));
        add(&mut d, next(), key(0));
        let (most, _) = looked(&d, 0, 20_000);
        assert_eq!(most, 1);
        for i in 1..4000 {
            add(&mut d, next(), key(i));
        }
        for (from, n) in [(0, 4000), (4000, 20_000), (0x0300_0000, 20_000)] {
            let (most, all) = looked(&d, from, n);
            // As many as dice of 4,096 sides would give.
            assert!(most <= 10, "{most} of {from}");
            assert!(all <= n as usize * 9 / 4, "{all} of {n} from {from}");
        }
        for i in (0..4000).rev() {
            let id = d.by_key(&key(i)).expect("it is there").id;
            d.remove(id).expect("it is there");
            assert!(d.by_key(&key(i)).is_none());
        }
        assert_eq!(looked(&d, 0, 4000), (0, 0));
    }

    /// Places are reserved while others come and go, and while the directory grows.
    #[cfg_attr(test, test)]
    pub(crate) fn a_reserved_place_is_kept() {
        let mut d = directory();
        assert!(d.reserve().is_none());
        drop(d.grow(Room::beyond(0).expect("memory")));
        let place = d.reserve().expect("there is room");
        let other = d.reserve().expect("there is room");
        d.give_back(other);
        let mut ids = [0; 40];
        for (id, n) in ids.iter_mut().zip(1..) {
            *id = add(&mut d, u64::from(n) << 32, key(n)).id;
            assert_ne!(*id & INDEX_MASK, u64::from(place));
        }
        assert_eq!(
            ids.first().map(|id| id & INDEX_MASK),
            Some(u64::from(other))
        );
        for id in ids {
            d.remove(id).expect("it is there");
        }
        let entry = Entry {
            id: 99 << 32 | u64::from(place),
            key: key(99),
        };
        assert_eq!(d.insert(entry), Ok(()));
        // Once: then it is taken, and a place that was not reserved is nobody's.
        assert_eq!(d.insert(entry), Err(entry));
        d.give_back(place);
        assert_eq!(d.by_key(&key(99)), Some(&entry));
        let free = Entry {
            id: entry.id + 1,
            key: key(98),
        };
        assert_eq!(d.insert(free), Err(free));
        // Memory for no more than there is already comes back.
        let places = d.places();
        assert_eq!(d.grow(Room::beyond(0).expect("memory")).places.len(), 16);
        assert_eq!(d.places(), places);
    }
}
