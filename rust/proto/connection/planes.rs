// SPDX-License-Identifier: GPL-2.0

//! Planes: the pairs of addresses over which the paths of a connection run.
//!
//! A connection begins on the addresses that name it. Each end tells the other about the
//! rest (`Planes` packets), and makes pairs of an address of its own and one of the peer's.
//! Nobody is sent anything on the peer's word: a pair is tried with challenges, a small one
//! first, and gets paths when padded ones have come back. From then on it is like any other
//! way: what its paths notice decides what goes there.
//!
//! A path that changes its plane keeps its numbers. It gets nothing new until what it has
//! outstanding has arrived; what has not after a while is sent again over the new plane.

#![forbid(unsafe_code)]

use super::transmit::first_from;
use super::{Connection, ConnectionState};
use crate::os::{AllocError, Vec};
use crate::proto::api::{Time, Transmit};
use crate::proto::congestion::{Pace, Shares, Ticket};
use crate::proto::path::Health;
use crate::proto::recovery::Rtt;
use crate::proto::wire::{Drop, PlaneAddress, Planes, Probe, Writer, PAYLOAD_PROBE, PLANES_MAX};

/// Between two challenges to addresses that have not answered yet, whatever the peer has
/// announced; and the longest time between two of one plane.
const CHALLENGE_APART: Time = 1_000_000;
const CHALLENGE_MAX: Time = 4_000_000_000;

/// Padded challenges without an answer after which a small one is sent again.
const PADDED_TRIES: u8 = 5;

/// Answers to padded challenges in a row that a plane needs.
const ANSWERS: u8 = 2;

/// Another list of the peer is taken no sooner than this, or it could have challenges sent to
/// ever new addresses.
const TAKEN_APART: Time = 100_000_000;

/// First and longest time between two announcements, until the peer has answered.
const ANNOUNCE_FIRST: Time = 2_000_000;
const ANNOUNCE_MAX: Time = 1_000_000_000;

/// Packets that a path may have in flight at first when it had to leave its plane.
const MOVED_PACKETS: u32 = 4;

/// Between two probes of paths that begin on a plane, or of those of a plane that came back.
const APART: Time = 20_000;

/// What is known about a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneState {
    /// There is none.
    Unused,
    /// It has not shown that it works: nothing but challenges goes there.
    Tried,
    /// Paths use it. Whether they get through is their own matter ([`super::PathInfo`]).
    Working,
    /// An end has withdrawn it: its paths go elsewhere.
    Leaving,
}

/// A plane of a connection, for its driver and for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneInfo {
    /// Index, as in [`Transmit::plane`] and [`super::PathInfo::plane`].
    pub plane: u8,
    /// Plane of the own device.
    pub local: u8,
    /// Plane of the peer's device.
    pub remote: u8,
    /// Address of the peer there.
    pub remote_gid: [u8; 16],
    /// State.
    pub state: PlaneState,
    /// Its paths, a bit each.
    pub paths: u64,
    /// Bytes in flight.
    pub inflight: u64,
    /// What the peer grants on it, kbit/s; 0 is no limit.
    pub share: u32,
}

/// A pair of addresses.
pub(super) struct Plane {
    state: PlaneState,
    local: u8,
    remote: u8,
    gid: [u8; 16],
    /// Both ends have it.
    wanted: bool,
    pub(super) paths: u64,
    /// Bytes in flight on its paths.
    pub(super) inflight: u64,
    /// The peer's share, kbit/s, and the window that follows from it.
    pub(super) share: u32,
    pub(super) share_window: u32,
    pub(super) pace: Pace,
    /// The local queue was full: no data before this.
    pub(super) blocked_until: Time,
    /// The driver has said that it is.
    pub(super) full: bool,
    pub(super) least_rtt: Time,
    /// Within this time its paths grow as one.
    pub(super) cautious_until: Time,
    pub(super) lossy_until: Time,
    /// The challenge that waits for its answer, 0 is none, and when it was sent.
    challenge: u64,
    sent: Time,
    /// Round trip of the latest one that was answered; 0 is unknown.
    rtt: Time,
    padded: bool,
    tries: u8,
    answers: u8,
    due: Time,
}

impl Plane {
    fn unused() -> Self {
        Self {
            state: PlaneState::Unused,
            local: 0,
            remote: 0,
            gid: [0; 16],
            wanted: false,
            paths: 0,
            inflight: 0,
            share: 0,
            share_window: u32::MAX,
            pace: Pace::new(),
            blocked_until: 0,
            full: false,
            least_rtt: Time::MAX,
            cautious_until: 0,
            lossy_until: 0,
            challenge: 0,
            sent: 0,
            rtt: 0,
            padded: false,
            tries: 0,
            answers: 0,
            due: 0,
        }
    }

    fn tried(now: Time, (local, remote, gid): Pair) -> Self {
        Self {
            state: PlaneState::Tried,
            local,
            remote,
            gid,
            wanted: true,
            due: now,
            ..Self::unused()
        }
    }

    fn is(&self, (local, remote, gid): &Pair) -> bool {
        self.state != PlaneState::Unused
            && (self.local, self.remote, self.gid) == (*local, *remote, *gid)
    }

    /// When it is to be challenged, an unproven address not before `apart`.
    fn challenge_at(&self, apart: Time) -> Time {
        match (self.state, self.padded) {
            (PlaneState::Tried, false) => self.due.max(apart),
            (PlaneState::Tried, true) => self.due,
            _ => Time::MAX,
        }
    }

    /// When data may go with `inflight` bytes in flight: `None` is not before something
    /// arrives.
    fn next(&self, inflight: u64) -> Option<Time> {
        let open = inflight == 0 || inflight < u64::from(self.share_window);
        (open && !self.full).then(|| self.blocked_until.max(self.pace.next()))
    }
}

/// Local plane, plane of the peer, its address there.
type Pair = (u8, u8, [u8; 16]);

/// What came in over one plane of the device.
#[derive(Default)]
pub(super) struct Inbound {
    pub(super) bytes: u64,
    pub(super) reported: u64,
    pub(super) reported_at: Time,
    /// What is granted to the peer, kbit/s, 0 is none; and what it was told last.
    grant: u32,
    told: u32,
    ticket: Option<Ticket>,
}

/// Planes of an end, by their ids.
#[derive(Clone, Copy, Default)]
struct List {
    has: u8,
    planes: [PlaneAddress; PLANES_MAX],
}

impl List {
    fn push(&mut self, p: PlaneAddress) {
        if let Some(place) = self.planes.get_mut(usize::from(p.id)) {
            *place = p;
            self.has |= 1 << (p.id & 7);
        }
    }

    fn get(&self, id: u8) -> Option<&PlaneAddress> {
        let p = self.planes.get(usize::from(id))?;
        (self.has & 1 << (id & 7) != 0).then_some(p)
    }

    fn iter(&self) -> impl Iterator<Item = &PlaneAddress> + '_ {
        let has = self.has;
        self.planes
            .iter()
            .enumerate()
            .filter(move |(i, _)| has & 1 << (i & 7) != 0)
            .map(|(_, p)| p)
    }

    fn same(&self, other: &Self) -> bool {
        self.has == other.has && self.iter().eq(other.iter())
    }

    /// Ids of those that may be used.
    fn usable(&self, ipv4: bool) -> u8 {
        self.iter()
            .filter(|p| !p.draining && p.is_ipv4() == ipv4)
            .fold(0, |m, p| m | 1 << (p.id & 7))
    }
}

/// What both ends have announced.
#[derive(Default)]
pub(super) struct Roster {
    own: List,
    /// Number of the own announcement, 0 is none; the one that the peer knows; when it is
    /// sent again.
    number: u32,
    known: u32,
    due: Time,
    interval: Time,
    peer: List,
    peer_number: u32,
    /// Epoch that the peer's handshake announced.
    peer_epoch: u16,
    /// When the list was taken.
    taken: Time,
    /// The peer is to be told that it was.
    answer: bool,
    next_challenge: Time,
    /// Paths that are to change their plane do so then; `Time::MAX` is never.
    moving_until: Time,
    /// The plane whose grant was told last.
    told: u8,
}

/// Room for several planes. Made and dropped outside the connection's lock.
pub struct PlaneMemory {
    planes: Vec<Plane>,
    inbound: Vec<Inbound>,
}

impl PlaneMemory {
    pub(super) fn new(planes: usize) -> Result<Self, AllocError> {
        Ok(Self {
            planes: Vec::from_fn(planes, |_| Plane::unused())?,
            inbound: Vec::from_fn(planes, |_| Inbound::default())?,
        })
    }

    pub(super) fn into_parts(self) -> (Vec<Plane>, Vec<Inbound>) {
        (self.planes, self.inbound)
    }
}

impl Connection {
    /// Memory that a connection needs to use more than one plane. Process context, no lock
    /// held.
    pub fn plane_memory() -> Result<PlaneMemory, AllocError> {
        PlaneMemory::new(PLANES_MAX)
    }

    /// Lets the connection use several planes. Gives back what is to be freed outside the
    /// lock. Without this it keeps to the addresses that name it, whatever the peer announces.
    pub fn allow_planes(&mut self, mut memory: PlaneMemory) -> PlaneMemory {
        if self.planes.len() >= memory.planes.len() {
            return memory;
        }
        for (new, old) in memory.planes.iter_mut().zip(self.planes.iter_mut()) {
            core::mem::swap(new, old);
        }
        for (new, old) in memory.inbound.iter_mut().zip(self.inbound.iter_mut()) {
            core::mem::swap(new, old);
        }
        core::mem::swap(&mut memory.planes, &mut self.planes);
        core::mem::swap(&mut memory.inbound, &mut self.inbound);
        memory
    }

    /// Names the planes of the own device, at any time: one that is new is announced and
    /// tried, one that drains gets nothing new, one that is not named any more is left at
    /// once. The connection has to be allowed to ([`Connection::allow_planes`]). Ignored are
    /// addresses that name no single host, and ids beyond [`PLANES_MAX`].
    pub fn set_planes(&mut self, now: Time, planes: &[PlaneAddress]) {
        if self.planes.len() < 2 || self.loopback {
            return;
        }
        let mut own = List::default();
        for p in planes.iter().filter(|p| p.is_unicast()) {
            own.push(*p);
        }
        let local_gid = self.ids.local_gid;
        if own.has == 0 && self.roster.own.has != 0 {
            // Somewhere it is: an announcement without planes says nothing.
            own.push(PlaneAddress {
                id: self.planes.first().map_or(0, |p| p.local),
                draining: false,
                gid: local_gid,
            });
        }
        if own.same(&self.roster.own) {
            return;
        }
        self.roster.own = own;
        let home = own.iter().find(|p| p.gid == local_gid).map(|p| p.id);
        if let (Some(plane), Some(id)) = (self.planes.first_mut(), home) {
            plane.local = id;
        }
        if self.state == ConnectionState::Up {
            self.announce(now);
            self.match_planes(now);
        }
    }

    /// The driver's queue of the device's plane `local` is full, or has room again. While it
    /// is, data goes over other planes.
    pub fn plane_full(&mut self, local: u8, full: bool) {
        for p in self.planes.iter_mut().filter(|p| p.local == local) {
            p.full = full;
        }
    }

    /// The planes.
    pub fn planes(&self) -> impl Iterator<Item = PlaneInfo> + '_ {
        (0..self.planes.len()).filter_map(|i| self.plane(i as u8))
    }

    /// A plane, by the index that [`Transmit::plane`] has; `None` when there is none.
    pub fn plane(&self, index: u8) -> Option<PlaneInfo> {
        let p = self.planes.get(usize::from(index))?;
        (p.state != PlaneState::Unused).then_some(PlaneInfo {
            plane: index,
            local: p.local,
            remote: p.remote,
            remote_gid: p.gid,
            state: p.state,
            paths: p.paths,
            inflight: p.inflight,
            share: p.share,
        })
    }

    /// The first plane is that of the addresses that name the connection.
    pub(super) fn make_home(&mut self) {
        let gid = self.ids.remote_gid;
        let mask = self.path_mask();
        if let Some(home) = self.planes.first_mut() {
            home.state = PlaneState::Working;
            home.gid = gid;
            home.wanted = true;
            home.paths = mask;
            home.inflight = 0;
        }
    }

    /// The connection is up (again): all paths are on its own addresses, and the others have
    /// to be announced.
    pub(super) fn begin_planes(&mut self, now: Time, peer_epoch: u16) {
        for p in self.planes.iter_mut().skip(1) {
            *p = Plane::unused();
        }
        if let Some(home) = self.planes.first_mut() {
            home.remote = 0;
        }
        self.make_home();
        for p in self.paths.iter_mut() {
            p.plane = 0;
            p.target = 0;
        }
        self.several = false;
        self.ready = u64::MAX;
        self.moving = 0;
        let r = &mut self.roster;
        r.number = 0;
        r.known = 0;
        r.peer = List::default();
        r.peer_number = 0;
        r.peer_epoch = peer_epoch;
        r.answer = false;
        r.moving_until = Time::MAX;
        self.plane_timer = Time::MAX;
        let usual = PlaneAddress {
            id: 0,
            draining: false,
            gid: self.ids.local_gid,
        };
        let own = self.roster.own;
        if own.has != 0 && !(own.has == 1 && own.get(0) == Some(&usual)) {
            self.announce(now);
            self.match_planes(now);
        }
    }

    /// The epoch that the peer's handshake told.
    pub(super) fn peer_epoch(&self) -> u16 {
        self.roster.peer_epoch
    }

    /// The peer is to hear of the own planes.
    fn announce(&mut self, now: Time) {
        let r = &mut self.roster;
        r.number = r.number.wrapping_add(1).max(1);
        r.due = now;
        r.interval = ANNOUNCE_FIRST;
        self.plane_timer = now;
    }

    /// The peer has told about its planes.
    pub(super) fn receive_planes(&mut self, now: Time, p: &Planes<'_>) -> Result<(), Drop> {
        let r = &mut self.roster;
        if p.epoch != r.peer_epoch || self.loopback {
            return Err(Drop::Epoch);
        }
        if (r.number.wrapping_sub(p.known) as i32) < 0 {
            return Err(Drop::AckInvalid);
        }
        if (p.known.wrapping_sub(r.known) as i32) > 0 {
            r.known = p.known;
        }
        if p.number == 0 {
            return Ok(());
        }
        match p.number.wrapping_sub(r.peer_number) as i32 {
            ..=-1 => return Err(Drop::Old),
            0 => {}
            _ => {
                // What comes too soon is not answered, so that it comes again.
                if r.peer_number != 0 && now.saturating_sub(r.taken) < TAKEN_APART {
                    return Err(Drop::Refused);
                }
                r.peer_number = p.number;
                r.taken = now;
                r.peer = List::default();
                for plane in p.iter() {
                    r.peer.push(plane);
                }
                let gid = self.ids.remote_gid;
                let home = r.peer.iter().find(|p| p.gid == gid).map(|p| p.id);
                if let (Some(plane), Some(id)) = (self.planes.first_mut(), home) {
                    plane.remote = id;
                }
                self.match_planes(now);
            }
        }
        self.roster.answer = true;
        self.plane_timer = now;
        Ok(())
    }

    /// The pairs that both ends' planes make: those with equal ids; what is left of both; what
    /// is left of one end with the planes of the other one in turn.
    fn pairs(&self) -> ([Pair; PLANES_MAX], usize) {
        let r = &self.roster;
        let ipv4 = PlaneAddress {
            gid: self.ids.remote_gid,
            ..PlaneAddress::default()
        }
        .is_ipv4();
        let home = self.planes.first().map_or((0, 0), |p| (p.local, p.remote));
        let name = |list: &List, id: u8| match list.usable(ipv4) {
            // It has announced nothing, or nothing that can be used.
            0 => 1u8 << (id & 7),
            has => has,
        };
        let own = name(&r.own, home.0);
        let peer = name(&r.peer, home.1);
        let mut pairs = [Pair::default(); PLANES_MAX];
        let mut n = 0usize;
        let mut add = |local: u32, remote: u32| {
            let remote = remote as u8;
            let gid = match r.peer.get(remote) {
                Some(p) => p.gid,
                None => self.ids.remote_gid,
            };
            if let Some(place) = pairs.get_mut(n) {
                *place = (local as u8, remote, gid);
                n = n.wrapping_add(1);
            }
        };
        let mut both = own & peer;
        while both != 0 {
            let id = both.trailing_zeros();
            both &= both.wrapping_sub(1);
            add(id, id);
        }
        let (mut mine, mut theirs) = (own & !peer, peer & !own);
        let (mut next_own, mut next_peer) = (own, peer);
        while mine != 0 || theirs != 0 {
            if mine == 0 {
                next_own &= next_own.wrapping_sub(1);
                if next_own == 0 {
                    next_own = own;
                }
            }
            if theirs == 0 {
                next_peer &= next_peer.wrapping_sub(1);
                if next_peer == 0 {
                    next_peer = peer;
                }
            }
            let local = if mine != 0 { mine } else { next_own };
            let remote = if theirs != 0 { theirs } else { next_peer };
            add(local.trailing_zeros(), remote.trailing_zeros());
            mine &= mine.wrapping_sub(1);
            theirs &= theirs.wrapping_sub(1);
        }
        (pairs, n)
    }

    /// The list of an end has changed: new pairs are tried, others left.
    fn match_planes(&mut self, now: Time) {
        if self.planes.len() < 2 {
            return;
        }
        let (pairs, n) = self.pairs();
        let mut placed = 0u8;
        let mut gone = 0u8;
        let (own, peer) = (self.roster.own, self.roster.peer);
        for (i, p) in self.planes.iter_mut().enumerate() {
            if p.state == PlaneState::Unused {
                continue;
            }
            let pair = pairs.iter().take(n).position(|pair| p.is(pair));
            p.wanted = pair.is_some();
            match pair {
                Some(k) => {
                    placed |= 1 << (k & 7);
                    if p.state == PlaneState::Leaving {
                        // Who knows what it was used for meanwhile.
                        if p.paths == 0 {
                            let pair = (p.local, p.remote, p.gid);
                            *p = Plane::tried(now, pair);
                        } else {
                            p.state = PlaneState::Working;
                        }
                    }
                }
                None if p.paths == 0 && i != 0 => *p = Plane::unused(),
                None => {
                    p.state = PlaneState::Leaving;
                    let named = |list: &List, id: u8, gid: Option<&[u8; 16]>| {
                        list.has == 0
                            || list
                                .get(id)
                                .is_some_and(|p| gid.is_none_or(|gid| p.gid == *gid))
                    };
                    if !named(&own, p.local, None) || !named(&peer, p.remote, Some(&p.gid)) {
                        gone |= 1 << (i & 7);
                    }
                }
            }
        }
        self.assign(now, gone);
        for (k, pair) in pairs.iter().take(n).enumerate() {
            if placed & 1 << (k & 7) != 0 {
                continue;
            }
            // What does not fit is tried when paths have left another one.
            if let Some(p) = self
                .planes
                .iter_mut()
                .skip(1)
                .find(|p| p.state == PlaneState::Unused)
            {
                *p = Plane::tried(now, *pair);
            }
        }
        let used = |p: &&Plane| p.state != PlaneState::Unused;
        self.several = self.planes.iter().filter(used).count() > 1;
        self.ready = u64::MAX;
        self.set_plane_timer(now);
    }

    /// Gives each plane that works its part of the paths, those that the connection is to use
    /// ([`super::Config::planes`]) as long as one of these does. Paths leave the planes of `gone`
    /// at once.
    fn assign(&mut self, now: Time, gone: u8) {
        let mut working = 0u8;
        let mut named = 0u8;
        for (i, p) in self.planes.iter().enumerate() {
            if p.state == PlaneState::Working {
                working |= 1 << (i & 7);
                if self.cfg.planes & 1 << (p.local & 7) != 0 {
                    named |= 1 << (i & 7);
                }
            }
        }
        if named != 0 {
            working = named;
        }
        if working == 0 {
            // The addresses that name the connection are always there.
            working = 1;
        }
        let n = usize::from(self.agreed.paths);
        let mut counts = [0u32; PLANES_MAX];
        let least = |counts: &[u32; PLANES_MAX]| {
            let works = |(i, _): &(usize, &u32)| working & 1 << (i & 7) != 0;
            let least = counts.iter().enumerate().filter(works).min_by_key(|c| c.1);
            least.map_or((0, 0), |(i, c)| (i, *c))
        };
        for p in self.paths.iter().take(n) {
            if let Some(c) = counts.get_mut(usize::from(p.target)) {
                *c = c.saturating_add(1);
            }
        }
        for p in self.paths.iter_mut().take(n) {
            if working & 1 << (p.target & 7) == 0 {
                let (to, _) = least(&counts);
                p.target = to as u8;
                if let Some(c) = counts.get_mut(to) {
                    *c = c.saturating_add(1);
                }
            }
        }
        // From the one with most to the one with fewest, every other path, so that neighbours
        // are on different planes.
        let mut from = 0;
        for _ in 0..n {
            let (to, few) = least(&counts);
            let works = |(i, _): &(usize, &u32)| working & 1 << (i & 7) != 0;
            let most = counts.iter().enumerate().filter(works).max_by_key(|c| c.1);
            let Some((rich, many)) = most.map(|(i, c)| (i, *c)) else {
                break;
            };
            if many <= few.saturating_add(1) {
                break;
            }
            let of_rich = (self.paths.iter().take(n).enumerate())
                .filter(|(_, p)| usize::from(p.target) == rich)
                .fold(0u64, |m, (i, _)| m | 1 << (i & 63));
            let i = first_from(of_rich, from);
            from = i.wrapping_add(2);
            if let Some(p) = self.paths.get_mut(i as usize) {
                p.target = to as u8;
            }
            if let Some(c) = counts.get_mut(rich) {
                *c = c.saturating_sub(1);
            }
            if let Some(c) = counts.get_mut(to) {
                *c = c.saturating_add(1);
            }
        }
        for i in 0..n {
            let bit = 1u64 << (i & 63);
            let Some(p) = self.paths.get(i) else {
                break;
            };
            let at_once = gone & 1 << (p.plane & 7) != 0 || !p.tx.is_outstanding();
            if p.target == p.plane {
                self.moving &= !bit;
            } else {
                self.moving |= bit;
            }
            if self.moving & bit != 0 && at_once {
                self.move_path(now, i);
            } else {
                self.refresh(i);
            }
        }
        self.roster.moving_until = if self.moving != 0 {
            now.saturating_add(
                self.srtt
                    .saturating_mul(4)
                    .max(self.pause().saturating_mul(2)),
            )
        } else {
            Time::MAX
        };
        self.free_planes();
    }

    /// Planes that were left are there no more.
    fn free_planes(&mut self) {
        for p in self.planes.iter_mut().skip(1) {
            if p.state == PlaneState::Leaving && p.paths == 0 {
                *p = Plane::unused();
            }
        }
    }

    /// Path `i` begins on the plane that it is meant for. What it has outstanding is sent there
    /// again.
    pub(super) fn move_path(&mut self, now: Time, i: usize) {
        let bit = 1u64 << (i & 63);
        let packet = self.packet_bytes();
        let least = packet.saturating_mul(MOVED_PACKETS);
        let load = self.load.get(i).copied().unwrap_or(0);
        let Some(p) = self.paths.get_mut(i) else {
            return;
        };
        let (old, new) = (usize::from(p.plane), usize::from(p.target));
        self.moving &= !bit;
        self.changed |= bit;
        let mut left = true;
        if let Some(plane) = self.planes.get_mut(old) {
            plane.paths &= !bit;
            plane.inflight = plane.inflight.saturating_sub(u64::from(load));
            left = plane.state != PlaneState::Working;
        }
        if let Some(l) = self.load.get_mut(i) {
            *l = 0;
        }
        let mut rtt = 0;
        if let Some(plane) = self.planes.get_mut(new) {
            plane.paths |= bit;
            rtt = plane.rtt;
        }
        p.plane = p.target;
        let before = p.tx.inflight();
        p.tx.keep_donations();
        p.tx.give_up();
        let flown = before.saturating_sub(p.tx.inflight());
        self.inflight = self.inflight.saturating_sub(u64::from(flown));
        p.rtt = Rtt::new();
        if rtt != 0 {
            p.rtt.sample(now, rtt);
        }
        if p.health == Health::Good {
            self.windows = self.windows.saturating_sub(u64::from(p.window.bytes()));
        }
        // A plane that is added takes its part of what flies; one that goes must not burden
        // the others.
        let window = p.window.bytes().max(least);
        let window = if left { window.min(least) } else { window };
        p.window.begin(window, packet);
        self.windows = self.windows.saturating_add(u64::from(p.window.bytes()));
        p.health = Health::Good;
        p.begin_anew();
        let soon = u64::from(self.moving.count_ones().min(64)).saturating_mul(APART);
        p.deadline = now.saturating_add(APART).saturating_add(soon);
        self.path_timer = self.path_timer.min(p.deadline);
        if p.tx.has_lost() {
            self.lost |= bit;
        } else {
            self.lost &= !bit;
        }
        self.good |= bit;
        for set in [
            &mut self.donors,
            &mut self.proven,
            &mut self.silent,
            &mut self.emptied,
            &mut self.overdue,
            &mut self.probe,
            &mut self.home_probe,
            &mut self.homing,
        ] {
            *set &= !bit;
        }
        self.refresh(i);
    }

    /// Path `i` has come back: so has its plane, perhaps; the others of it are asked at once.
    pub(super) fn wake_plane(&mut self, now: Time, i: usize) {
        let plane = self.paths.get(i).map_or(0, |p| p.plane);
        let paths = self.planes.get(usize::from(plane)).map_or(0, |p| p.paths);
        let mut mask = paths & self.path_mask() & !self.good;
        let mut at = now;
        while mask != 0 {
            let j = mask.trailing_zeros();
            mask &= mask.wrapping_sub(1);
            at = at.saturating_add(APART);
            if let Some(p) = self.paths.get_mut(j as usize) {
                p.unanswered = 0;
                p.deadline = p.deadline.min(at);
                self.path_timer = self.path_timer.min(at);
            }
        }
    }

    /// Paths of planes on which data may go now.
    pub(super) fn ready_paths(&self, now: Time) -> u64 {
        self.planes
            .iter()
            .filter(|p| p.next(p.inflight).is_some_and(|t| t <= now))
            .fold(0, |m, p| m | p.paths)
    }

    /// When data may go on one of the paths in `mask`.
    pub(super) fn planes_next(&self, mask: u64) -> Time {
        self.planes
            .iter()
            .filter(|p| p.paths & mask != 0)
            .filter_map(|p| {
                p.next(if self.several {
                    p.inflight
                } else {
                    self.inflight
                })
            })
            .min()
            .unwrap_or(Time::MAX)
    }

    /// The paths of `mask` that are on the plane with the least in flight; of equals on the
    /// next one in turn.
    pub(super) fn lightest(&self, mask: u64) -> u64 {
        let last = self
            .paths
            .get(self.run_path as usize)
            .map_or(0, |p| p.plane);
        let planes: &[Plane] = &self.planes;
        let (first, rest) = match planes.split_at_checked(usize::from(last).wrapping_add(1)) {
            Some((a, b)) => (b, a),
            None => (planes, [].as_slice()),
        };
        let mut best = (u64::MAX, 0);
        for p in first.iter().chain(rest) {
            if p.paths & mask != 0 && p.inflight < best.0 {
                best = (p.inflight, p.paths & mask);
            }
        }
        best.1
    }

    /// What the handshake of planes has to send.
    pub(super) fn poll_planes(&mut self, now: Time, out: &mut Transmit) -> bool {
        if self.roster.moving_until <= now {
            self.roster.moving_until = Time::MAX;
            let mut late = self.moving;
            while late != 0 {
                self.move_path(now, late.trailing_zeros() as usize);
                late &= late.wrapping_sub(1);
            }
            // There may be a place now for what did not fit.
            self.free_planes();
            self.match_planes(now);
        }
        let r = &self.roster;
        let sent = if r.answer || (r.number != r.known && r.due <= now) {
            self.send_planes(now, out);
            true
        } else {
            let next = r.next_challenge;
            let due = self.planes.iter().position(|p| p.challenge_at(next) <= now);
            due.is_some_and(|i| self.challenge(now, i, out))
        };
        self.set_plane_timer(now);
        sent
    }

    fn set_plane_timer(&mut self, now: Time) {
        let r = &self.roster;
        let mut t = r.moving_until;
        if r.answer {
            t = now;
        }
        if r.number != r.known {
            t = t.min(r.due);
        }
        for p in self.planes.iter() {
            t = t.min(p.challenge_at(r.next_challenge));
        }
        self.plane_timer = t;
    }

    fn send_planes(&mut self, now: Time, out: &mut Transmit) {
        Self::blank(out);
        let epoch = self.opened_epoch;
        let r = &mut self.roster;
        let mut list = [PlaneAddress::default(); PLANES_MAX];
        let mut n = 0usize;
        let mut number = 0;
        if r.number != r.known {
            number = r.number;
            for (place, p) in list.iter_mut().zip(r.own.iter()) {
                *place = *p;
                n = n.wrapping_add(1);
            }
            r.due = now.saturating_add(r.interval);
            r.interval = r.interval.saturating_mul(2).min(ANNOUNCE_MAX);
        }
        r.answer = false;
        let mut w = Writer::new(&mut out.header);
        let planes = list.get(..n).unwrap_or(&[]);
        Planes::emit(
            &mut w,
            self.remote_cid,
            (number, r.peer_number, epoch),
            planes,
        );
        out.header_len = w.finish();
        let i = self.next_good(now, None);
        self.address(out, i);
    }

    /// Asks whether plane `i` answers. Only what a small question has brought back is asked
    /// with a full packet.
    fn challenge(&mut self, now: Time, i: usize, out: &mut Transmit) -> bool {
        let challenge = self.draw().max(1);
        let port = self.any_port();
        let full = self.agreed.payload_mtu.saturating_add(PAYLOAD_PROBE);
        let wait = (self.srtt.saturating_mul(2))
            .saturating_add(self.pause())
            .max(CHALLENGE_APART);
        let Some(plane) = self.planes.get_mut(i) else {
            return false;
        };
        if plane.padded && plane.tries >= PADDED_TRIES {
            plane.padded = false;
        }
        let padding = if plane.padded { full } else { 0 };
        plane.challenge = challenge;
        plane.sent = now;
        let wait = wait << plane.tries.min(12);
        plane.due = now.saturating_add(wait.min(CHALLENGE_MAX));
        plane.tries = plane.tries.saturating_add(1);
        if padding == 0 {
            self.roster.next_challenge = now.saturating_add(CHALLENGE_APART);
        }
        // Another path for each, since a peer answers the newest probe of a path.
        let at = (i as u32).checked_rem(u32::from(self.agreed.paths));
        let at = at.unwrap_or(0);
        let sent = self.send_probe(now, at, challenge, padding, out).is_some();
        out.plane = i as u8;
        out.source_port = port;
        sent
    }

    /// Whether the reply is to a challenge of a plane.
    pub(super) fn plane_reply(&mut self, now: Time, p: &Probe) -> bool {
        let answered = |q: &&mut Plane| {
            q.state == PlaneState::Tried && q.challenge != 0 && q.challenge == p.challenge
        };
        let Some(plane) = self.planes.iter_mut().find(answered) else {
            return false;
        };
        plane.challenge = 0;
        plane.rtt = now.saturating_sub(plane.sent).max(1);
        plane.tries = 0;
        plane.due = now;
        self.newest = self.newest.max(plane.sent);
        self.counters.probe_replies = self.counters.probe_replies.wrapping_add(1);
        if !plane.padded {
            plane.padded = true;
            plane.answers = 0;
        } else {
            plane.answers = plane.answers.saturating_add(1);
            if plane.answers >= ANSWERS {
                plane.state = PlaneState::Working;
                plane.least_rtt = plane.rtt;
                self.assign(now, 0);
            }
        }
        self.set_plane_timer(now);
        true
    }

    /// Takes the share that the peer grants on its plane `remote`.
    pub(super) fn receive_share(&mut self, now: Time, remote: u8, kbit: u32) {
        if !self.several {
            let home = self.planes.first();
            if home.is_some_and(|p| p.remote == remote && p.share != kbit) {
                self.set_share(now, 0, kbit);
            }
            return;
        }
        let uses = |p: &&Plane| p.remote == remote && p.state != PlaneState::Unused;
        // Planes that end at the same address divide what it grants.
        let parts = (self.planes.iter().filter(uses))
            .filter(|p| p.paths != 0)
            .count()
            .max(1) as u32;
        let part = match kbit.checked_div(parts) {
            Some(0) | None => kbit.min(1),
            Some(part) => part,
        };
        for i in 0..self.planes.len() {
            let changed = (self.planes.get(i)).is_some_and(|p| uses(&p) && p.share != part);
            if changed {
                self.set_share(now, i, part);
            }
        }
    }

    /// The grant that the next acknowledgement tells, and the plane that it is about: news
    /// first, then one after the other.
    pub(super) fn grant_to_tell(&mut self) -> (u32, u8) {
        let n = self.inbound.len();
        let mut at = 0;
        if n > 1 {
            let from = usize::from(self.roster.told);
            let mut next = None;
            for k in 1..=n {
                let i = from.wrapping_add(k).checked_rem(n).unwrap_or(0);
                let Some(p) = self.inbound.get(i) else {
                    continue;
                };
                if p.grant != p.told {
                    next = Some(i);
                    break;
                }
                if p.ticket.is_some() {
                    next = next.or(Some(i));
                }
            }
            at = next.unwrap_or(self.planes.first().map_or(0, |p| usize::from(p.local)));
            self.roster.told = at as u8;
        }
        match self.inbound.get_mut(at) {
            Some(p) => {
                p.told = p.grant;
                (p.grant, at as u8)
            }
            None => (0, at as u8),
        }
    }

    /// Reports what the peer has sent lately to plane `local` of the device, to the shares of
    /// that plane.
    pub fn report_on(&mut self, now: Time, local: u8, shares: &mut Shares) {
        let Some(p) = self.inbound.get_mut(usize::from(local)) else {
            return;
        };
        let bytes = p.bytes.wrapping_sub(p.reported);
        if bytes == 0 && local != 0 {
            return;
        }
        p.reported = p.bytes;
        p.reported_at = now;
        let (grant, ticket) = shares.report(now, p.ticket, bytes);
        p.grant = grant;
        p.ticket = ticket;
    }
}
