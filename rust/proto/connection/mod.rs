// SPDX-License-Identifier: GPL-2.0

//! A connection: two endpoints, many paths below, many streams above.
//!
//! Packets of all streams are sprayed over all paths. A path numbers what it carries and
//! is responsible for it until it is acknowledged; a stream knows what the packets mean.
//! PROTOCOL.md has the rules, file by file:
//!
//! | module | what |
//! | --- | --- |
//! | `handshake` | coming up, cookies, answers without state |
//! | `receive` | packets in: data, acknowledgements, probes |
//! | `transmit` | packets out: choice of what and of the path |
//! | `timers` | silence, health of paths, stream timers |
//! | `rest` | idle connections: closed and opened again, unseen |
//! | `planes` | pairs of addresses, and which paths use which |
//! | `streams` | slots and lists |
//! | `telemetry` | counters |

#![forbid(unsafe_code)]

mod handshake;
mod planes;
mod receive;
mod rest;
mod streams;
mod telemetry;
mod timers;
mod transmit;

pub use self::handshake::{features, stateless_reply};
pub use self::planes::{PlaneInfo, PlaneMemory, PlaneState};
pub use self::streams::Spare;
pub use self::telemetry::{Counters, PathInfo};
pub use super::path::Health;

pub(super) use self::handshake::{gid_words, keyed_hash};

use self::handshake::{Answer, Attempt};
use self::planes::{Inbound, Plane, Roster};
use self::rest::Rest;
use self::streams::{List, Streams};
use super::api::{
    ConnectionError, Direction, Event, Fault, Host, Placed, SendWr, Status, StreamId, Time, Token,
    Transmit, DATA_OVERHEAD,
};
use super::congestion::{initial, Controller, Shares};
use super::path::{Content, Path, Record, OUTSTANDING_MAX};
use super::recovery::{Longest, Margin, INITIAL_RTT};
use super::stream::{PostError, State, Stream, StreamBlock};
use super::wire::{CloseKind, Probe};
use crate::os::{try_box, AllocError, Box, Vec};

/// Paths at the most.
pub const PATHS_MAX: usize = 64;

/// Least payload of a full packet, in bytes; a smaller one is refused.
pub const PAYLOAD_MTU_MIN: u32 = 512;

/// The payload of a full packet is a multiple of this, so that slices start aligned.
const PAYLOAD_UNIT: u32 = 16;

/// Send records of a path at the least.
pub const RECORDS_MIN: usize = 16;

/// Final blocks kept for streams that are gone.
const TOMBSTONES: usize = 64;

/// How long they are kept, and how long a connection outlives its last stream.
const TOMBSTONE_LIFE: Time = 4_000_000_000;

/// Streams that a packet asked for and that are not there, to be answered.
const REFUSALS: usize = 16;

/// Lateness is told to the peer in units of this power of two, in ns.
const LATENESS_SHIFT: u32 = 16;

/// A queue delays answers by this much at the most.
const PAUSE_MAX: Time = 1_000_000;

/// Between two reports to the device's shares, which watch the link for 10 µs and more.
const REPORT: Time = 2_000;

/// Probes that wait for their replies to be sent.
const REPLIES: usize = 16;

/// What a connection has to know about its device.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// MTU of the netdev in bytes, IP header included.
    pub netdev_mtu: u32,
    /// The addresses are IPv6.
    pub ipv6: bool,
    /// Paths to use, 1 to 64.
    pub paths: u8,
    /// Ask for a CRC32C in every packet.
    pub crc: bool,
    /// UDP checksum 0 may be used on IPv6.
    pub zero_checksum6: bool,
    /// Send records of a path at the beginning and at rest, which bound its outstanding packets
    /// ([`Connection::wants_records`]): a power of two from 16 to 256.
    pub path_records: u16,
    /// Least margin of every verdict on silence, ns. 1 ms in the driver.
    pub margin: Time,
    /// Time that hosts need for batching, ns; the window that a share allows covers it.
    pub batching: Time,
    /// A connection that has been idle for so long is closed until it is needed again, ns;
    /// 0 is never.
    pub idle: Time,
    /// What the windows of the paths do.
    pub controller: Controller,
    /// Planes of the own device over which it sends, a bit each, by their ids; over all, while
    /// none of these is usable. What the peer sends comes over whichever the peer chooses.
    pub planes: u8,
    /// Names the device and its life: another one after each restart. Random.
    pub instance: u64,
    /// Key of cookies and challenges. Random, the same for all connections of a device.
    pub secret: [u8; 16],
    /// Where the first source ports come from. Random, or chosen to repeat a run.
    pub seed: u64,
    /// What a connection chooses at random, ports and paths, follows from the seed and the addresses
    /// alone. Nonces and challenges never do.
    pub repeat: bool,
    /// Lowest source port; ports are chosen from the 16384 from there on.
    pub port_base: u16,
}

impl Config {
    /// Usual values, nothing random in them.
    pub const fn new(netdev_mtu: u32) -> Self {
        Self {
            netdev_mtu,
            ipv6: false,
            paths: 16,
            crc: true,
            zero_checksum6: true,
            path_records: 64,
            margin: 1_000_000,
            batching: 100_000,
            idle: 30_000_000_000,
            controller: Controller::Aimd,
            planes: u8::MAX,
            instance: 0,
            secret: [0; 16],
            seed: 0,
            repeat: false,
            port_base: 0xc000,
        }
    }

    /// Payload of a full packet on this netdev, in bytes; 0 when the MTU is too small.
    pub fn payload_mtu(&self) -> u32 {
        let headers = if self.ipv6 { 48 } else { 28 } + DATA_OVERHEAD as u32;
        // 65535 is what a UDP length can say, and 61440 leaves room for all headers.
        let room = self.netdev_mtu.saturating_sub(headers).min(61_440);
        room / PAYLOAD_UNIT * PAYLOAD_UNIT
    }

    fn features(&self) -> u32 {
        let mut f = 0;
        if self.crc {
            f |= features::CRC;
        }
        if self.zero_checksum6 {
            f |= features::ZERO_CHECKSUM6;
        }
        f
    }
}

/// Who a connection is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// What the peer writes into its packets; finds the connection. Not 0, unpredictable.
    pub local_cid: u64,
    /// Own GID.
    pub local_gid: [u8; 16],
    /// GID of the peer.
    pub remote_gid: [u8; 16],
    /// Differentiated services code point, 6 bits.
    pub dscp: u8,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The handshake is going on.
    Connecting,
    /// Data may flow.
    Up,
    /// Idle: closed by agreement with its QPs attached, and opened again by whatever comes next.
    Resting,
    /// It has asked the peer to close.
    Closing,
    /// The peers have parted.
    Closed,
    /// The peer does not speak our version.
    Failed,
}

/// What the handshake agreed on.
#[derive(Clone, Copy, Debug)]
struct Negotiated {
    paths: u8,
    features: u32,
    payload_mtu: u32,
}

/// The last words of a stream that is gone.
#[derive(Clone, Copy)]
struct Tombstone {
    qpn: u32,
    remote_qpn: u32,
    blocks: [StreamBlock; 2],
    until: Time,
    /// Times that the blocks are still to be sent.
    announce: u8,
}

/// A probe to be answered.
#[derive(Clone, Copy)]
struct Reply {
    probe: Probe,
    /// Over the path with its number first.
    own: bool,
    /// Times that it is still to be answered.
    left: u8,
}

/// Acknowledgements to be sent.
struct AckState {
    /// Paths with news.
    dirty: u64,
    packets: u32,
    bytes: u32,
    /// One was asked for, or something unusual is to be told.
    at_once: bool,
    /// The batch of received packets is over.
    batch_over: bool,
    /// Sent at the latest then; `Time::MAX` is never.
    deadline: Time,
    number: u32,
    /// Packets whose bytes the driver is putting in place.
    placing: u32,
    /// Path of the last acknowledgement.
    rotor: u32,
    /// Marked packets of the batch so far.
    ce_in_batch: bool,
    /// The next one goes over two paths: the peer has missed one.
    twice: bool,
    /// Blocks NOT_READY for streams that packets named and that are not here.
    refused: Vec<StreamBlock>,
    /// Probes to be answered.
    replies: Vec<Reply>,
}

/// Probing for the greatest packet that passes.
#[derive(Clone, Copy)]
struct MtuSearch {
    /// Payload that is being probed; 0 is none.
    probing: u32,
    tries: u8,
    /// Rounds of tries in which nobody was heard.
    rounds: u8,
    due: Time,
    challenge: u64,
}

/// Getting a few packets through while nothing at all is heard.
#[derive(Clone, Copy, Default)]
struct Rescue {
    /// It goes on: packets that move take the most promising path, whatever its window.
    running: bool,
    /// Times in a row; until then the next one waits.
    tries: u8,
    due: Time,
    /// When something was heard last.
    heard: Time,
    /// When the first question went unanswered since then; 0 is never.
    since: Time,
    /// When other paths were asked last.
    asked: Time,
    /// The last packet went over any path.
    anywhere: bool,
    /// The peer has said lately, until then, that it hears nothing.
    peer_until: Time,
    /// Copies that are still to be sent of `content`, over paths not in `used`.
    copies: u8,
    used: u64,
    content: Option<Content>,
}

impl Rescue {
    /// Something was heard.
    fn over(&mut self, now: Time) {
        self.heard = now;
        self.tries = 0;
        self.due = 0;
        self.since = 0;
        self.copies = 0;
        self.content = None;
    }
}

/// Send records that a path has when `wanted` are asked for.
fn records_of(wanted: usize) -> usize {
    wanted
        .clamp(RECORDS_MIN, OUTSTANDING_MAX as usize)
        .next_power_of_two()
}

/// Send records for all paths of a connection; also what is left over. Made and dropped
/// outside the connection's lock.
pub struct Records(Vec<Vec<Record>>);

/// One connection. See the top of [`api`](super::api) for how to drive it.
pub struct Connection {
    cfg: Config,
    ids: Ids,
    state: ConnectionState,
    remote_cid: u64,
    peer_instance: Option<u64>,
    agreed: Negotiated,
    loopback: bool,

    attempt: Attempt,
    /// A handshake goes on beside the data, since the peer may have lost its state.
    reattempt: bool,
    reattempted: Time,
    not_yet: Time,
    answer: Option<Answer>,
    /// Epoch that the own handshake packets announce, and the one that was opened last.
    first_epoch: u16,
    opened_epoch: u16,

    paths: Vec<Path>,
    /// Bytes in flight by path.
    load: Vec<u32>,
    /// The same times what the round trip says about queues: what the scheduler compares.
    score: Vec<u32>,
    /// Paths in use that are good.
    good: u64,
    /// Good paths whose window and records have room.
    open: u64,
    /// Paths with lost packets.
    lost: u64,
    /// Paths whose packets others are to take over.
    donors: u64,
    /// Paths that are to be probed.
    probe: u64,
    /// Paths that are silent although later packets of others were acknowledged: a data
    /// packet on them tells.
    overdue: u64,
    /// Paths that have worked when they were last tried.
    proven: u64,
    /// Good paths that were asked and have not answered: nothing new goes there.
    silent: u64,
    /// Of those, paths whose packets others have taken over.
    emptied: u64,
    rescue: Box<Rescue>,
    /// Paths whose state changed since the last event.
    changed: u64,
    rotor: u32,
    /// Path of the running run and the bytes that are left of it.
    run_path: u32,
    run_left: u32,
    /// A path had a window and no record for a packet.
    short_of_records: bool,
    /// Nothing has moved for a while: the least memory will do.
    unused: bool,

    /// Pairs of addresses; the first is that of the connection's name.
    planes: Vec<Plane>,
    /// What comes in, by plane of the device.
    inbound: Vec<Inbound>,
    roster: Box<Roster>,
    /// There is more than one plane.
    several: bool,
    /// Paths on planes on which data may go now; all, while there is one plane.
    ready: u64,
    /// Paths that change their plane once nothing of theirs is outstanding.
    moving: u64,
    plane_timer: Time,

    random: u64,
    /// Choices so far, counted where they are to be repeated.
    choices: u32,

    inflight: u64,
    /// Sum of the windows of good paths.
    windows: u64,
    /// Data was ready and no window was open.
    limited: bool,
    /// Sent since the last packet that asked for an acknowledgement.
    since_request_packets: u32,
    since_request_bytes: u32,

    srtt: Time,
    long_rtt: Longest,
    least_since: Time,
    margin: Margin,
    /// Send time of the newest packet of any path that is known to have arrived.
    newest: Time,
    next_scan: Time,
    /// Own acknowledgements may be getting lost until then.
    doubt_until: Time,
    /// When paths that are away from their first port are asked whether it works again.
    home_timer: Time,
    /// Paths to be asked so, and paths that go home once nothing of theirs is outstanding.
    home_probe: u64,
    homing: u64,
    path_timer: Time,
    stream_timer: Time,
    /// The part of `stream_timer` that must be in time.
    stream_wait: Time,
    /// When the last packet was lost, or somebody did not answer.
    trouble: Time,
    /// The earliest that [`Connection::wake_at`] has returned since time passed.
    woken: Time,

    ack: AckState,
    streams: Streams,
    tombstones: Vec<Tombstone>,
    tombstone_at: usize,

    mtu: MtuSearch,
    closing: Option<(CloseKind, u32)>,
    close_number: u32,
    close_tries: u8,
    close_due: Time,
    rest: Box<Rest>,
    /// Since when there is no stream.
    empty_since: Time,

    event_up: bool,
    event_failed: Option<ConnectionError>,
    event_closed: bool,
    counters: Box<Counters>,
}

impl Connection {
    /// A connection between two endpoints. It starts the handshake at once, except with
    /// itself: then it is up.
    pub fn new(cfg: &Config, ids: Ids, now: Time) -> Result<Self, AllocError> {
        let mut cfg = *cfg;
        cfg.paths = cfg.paths.clamp(1, PATHS_MAX as u8);
        let records = records_of(cfg.path_records.into());
        cfg.path_records = records as u16;
        let mut random = handshake::keyed_hash(&cfg.secret, &[cfg.seed, ids.local_cid]);
        let mut draw = || {
            random = random.wrapping_add(1);
            handshake::keyed_hash(&cfg.secret, &[random, cfg.seed])
        };
        let nonce = draw();
        let first_epoch = draw() as u16;
        let mut paths = Vec::with_capacity(usize::from(cfg.paths))?;
        // First ports follow from the seed and the addresses alone, so that they repeat.
        let pair = handshake::keyed_hash(&ids.local_gid, &[u64::from(ids.dscp)])
            ^ handshake::keyed_hash(&ids.remote_gid, &[cfg.seed]);
        for i in 0..cfg.paths {
            let drawn = handshake::keyed_hash(&[0; 16], &[cfg.seed, pair, u64::from(i)]);
            let port = cfg.port_base.wrapping_add((drawn & 0x3fff) as u16);
            let path = Path::new(first_epoch, records, port, cfg.controller)?;
            if paths.push(path).is_err() {
                return Err(AllocError);
            }
        }
        let (planes, inbound) = PlaneMemory::new(1)?.into_parts();
        let loopback = ids.local_gid == ids.remote_gid;
        let agreed = Negotiated {
            paths: cfg.paths,
            features: cfg.features(),
            payload_mtu: cfg.payload_mtu(),
        };
        let mut c = Self {
            cfg,
            ids,
            state: ConnectionState::Connecting,
            remote_cid: 0,
            peer_instance: None,
            agreed,
            loopback,
            attempt: Attempt::new(nonce, now),
            reattempt: false,
            reattempted: 0,
            not_yet: 0,
            answer: None,
            first_epoch,
            opened_epoch: first_epoch,
            paths,
            load: Vec::from_fn(usize::from(cfg.paths), |_| 0)?,
            score: Vec::from_fn(usize::from(cfg.paths), |_| 0)?,
            good: 0,
            open: 0,
            lost: 0,
            donors: 0,
            probe: 0,
            overdue: 0,
            proven: 0,
            silent: 0,
            emptied: 0,
            rescue: try_box(Rescue::default())?,
            changed: 0,
            rotor: 0,
            run_path: 0,
            run_left: 0,
            short_of_records: false,
            unused: false,
            planes,
            inbound,
            roster: try_box(Roster::default())?,
            several: false,
            ready: u64::MAX,
            moving: 0,
            plane_timer: Time::MAX,
            random,
            choices: 0,
            inflight: 0,
            windows: 0,
            limited: false,
            since_request_packets: 0,
            since_request_bytes: 0,
            srtt: INITIAL_RTT,
            long_rtt: Longest::default(),
            least_since: now,
            margin: Margin::new(cfg.margin),
            newest: 0,
            next_scan: 0,
            doubt_until: 0,
            home_timer: Time::MAX,
            home_probe: 0,
            homing: 0,
            path_timer: Time::MAX,
            stream_timer: Time::MAX,
            stream_wait: Time::MAX,
            trouble: now,
            woken: Time::MAX,
            ack: AckState {
                dirty: 0,
                packets: 0,
                bytes: 0,
                at_once: false,
                batch_over: false,
                deadline: Time::MAX,
                number: 0,
                placing: 0,
                rotor: 0,
                ce_in_batch: false,
                twice: false,
                refused: Vec::with_capacity(REFUSALS)?,
                replies: Vec::with_capacity(REPLIES)?,
            },
            streams: Streams::new(),
            tombstones: Vec::with_capacity(TOMBSTONES)?,
            tombstone_at: 0,
            mtu: MtuSearch {
                probing: 0,
                tries: 0,
                rounds: 0,
                due: Time::MAX,
                challenge: 0,
            },
            closing: None,
            close_number: 0,
            close_tries: 0,
            close_due: Time::MAX,
            rest: try_box(Rest::new())?,
            empty_since: now,
            event_up: false,
            event_failed: None,
            event_closed: false,
            counters: try_box(Counters::default())?,
        };
        c.make_home();
        if loopback {
            let (cid, epoch) = (c.ids.local_cid, c.first_epoch);
            c.peer_instance = Some(c.cfg.instance);
            c.up(now, agreed, cid, epoch);
        }
        Ok(c)
    }

    /// Who it is between.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Its state.
    pub fn state(&self) -> ConnectionState {
        self.state
    }

    /// Every packet carries a CRC32C (else a UDP checksum). Before the connection is up,
    /// what this end wishes.
    pub fn crc(&self) -> bool {
        self.agreed.features & features::CRC != 0
    }

    /// UDP checksum 0 may be used on IPv6 packets of this connection.
    pub fn zero_checksum6(&self) -> bool {
        self.agreed.features & features::ZERO_CHECKSUM6 != 0
    }

    /// What the windows of its paths do.
    pub fn controller(&self) -> Controller {
        self.cfg.controller
    }

    /// Planes of the own device over which it sends ([`Config::planes`]).
    pub fn planes_named(&self) -> u8 {
        self.cfg.planes
    }

    /// Payload bytes of a full packet.
    pub fn payload_mtu(&self) -> u32 {
        self.agreed.payload_mtu
    }

    /// For how many streams [`Connection::attach`] needs memory; 0 is "there is enough".
    pub fn wanted_slots(&self) -> usize {
        self.streams.wanted()
    }

    /// Memory for [`Connection::wanted_slots`] streams: none for 0, else for at least so many
    /// ([`Spare::slots`]). Process context, no lock held.
    pub fn spare(streams: usize) -> Result<Spare, AllocError> {
        Spare::new(streams)
    }

    /// How many send records per path there should be, when that is another number than there
    /// are: twice as many, when there are too few for the windows, or as many as at the
    /// beginning, when nothing has moved for a while.
    pub fn wants_records(&self) -> Option<usize> {
        let have = self.records();
        if self.short_of_records && have < OUTSTANDING_MAX as usize {
            Some(have.saturating_mul(2))
        } else {
            let least = usize::from(self.cfg.path_records);
            (self.unused && have > least).then_some(least)
        }
    }

    /// Whether nothing has moved for a while, and memory that only a connection in use needs may
    /// go; until [`Connection::use_records`] or [`Connection::memory_is_least`].
    pub fn is_unused(&self) -> bool {
        self.unused
    }

    /// What an unused connection does not need has gone.
    pub fn memory_is_least(&mut self) {
        self.unused = false;
    }

    /// Send records of a path.
    pub fn records(&self) -> usize {
        self.paths.first().map_or(0, |p| p.tx.records())
    }

    /// Memory for `records` send records per path. Process context, no lock held.
    pub fn record_memory(paths: usize, records: usize) -> Result<Records, AllocError> {
        let n = records_of(records);
        let mut rings = Vec::with_capacity(paths)?;
        for _ in 0..paths {
            let ring = Vec::from_fn(n, |_| Record::default())?;
            if rings.push(ring).is_err() {
                return Err(AllocError);
            }
        }
        Ok(Records(rings))
    }

    /// Takes other send records into use, more or fewer, and gives back what is not needed:
    /// the former ones, or these, when what is outstanding does not fit in.
    pub fn use_records(&mut self, mut records: Records) -> Records {
        let fits = |p: &Path, ring: &Vec<Record>| p.tx.fits_in(ring.len());
        if self.paths.len() == records.0.len()
            && self
                .paths
                .iter()
                .zip(records.0.iter())
                .all(|(p, r)| fits(p, r))
        {
            for (p, ring) in self.paths.iter_mut().zip(records.0.iter_mut()) {
                p.tx.exchange(ring);
            }
        }
        self.short_of_records = false;
        self.unused = false;
        for i in 0..self.paths.len() {
            self.refresh(i);
        }
        records
    }

    /// The name of the peer's device ([`Config::instance`] there), once it is known.
    pub fn peer_instance(&self) -> Option<u64> {
        self.peer_instance
    }

    /// Paths for which there is memory.
    pub fn path_count(&self) -> usize {
        self.paths.len()
    }

    /// Streams attached.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Attaches a stream, whose attributes are set, and gives its id and what is left of
    /// `spare` ([`Connection::spare`]), to be freed outside the lock. Hands both back when the
    /// connection is closing, closed or failed.
    #[allow(clippy::result_large_err)] // both are handed back as they came
    pub fn attach(
        &mut self,
        now: Time,
        stream: Box<Stream>,
        spare: Spare,
    ) -> Result<(StreamId, Spare), (Box<Stream>, Spare)> {
        if !matches!(
            self.state,
            ConnectionState::Connecting | ConnectionState::Up | ConnectionState::Resting
        ) {
            return Err((stream, spare));
        }
        let (id, spare) = self.streams.insert(stream, spare)?;
        let mtu = self.agreed.payload_mtu;
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.set_payload_mtu(mtu);
            if s.state() != State::Reset {
                // The peer may have been refused before: tell it that the QP is there now.
                self.mark_dirty(id.0);
            }
        }
        // Ask again soon, should the peer have said that it is not ready.
        if self.state == ConnectionState::Connecting {
            self.attempt.due = self.attempt.due.min(now);
        }
        self.touch(now, id.0);
        Ok((id, spare))
    }

    /// Takes a stream out. Its final blocks are sent and kept for a while.
    pub fn detach(&mut self, now: Time, id: StreamId) -> Option<Box<Stream>> {
        let stream = self.streams.remove(id)?;
        let attr = stream.attr();
        if !matches!(stream.state(), State::Reset | State::Init) {
            let tombstone = Tombstone {
                qpn: attr.local_qpn,
                remote_qpn: attr.remote_qpn,
                blocks: [
                    stream.block(Direction::Request),
                    stream.block(Direction::Response),
                ],
                until: now.saturating_add(TOMBSTONE_LIFE),
                // While the connection rests the peer waits for nothing.
                announce: if self.state == ConnectionState::Resting {
                    0
                } else {
                    2
                },
            };
            if let Err(t) = self.tombstones.push(tombstone) {
                // The oldest one gives way.
                if let Some(old) = self.tombstones.get_mut(self.tombstone_at) {
                    *old = t;
                }
                self.tombstone_at = self.tombstone_at.wrapping_add(1) % TOMBSTONES;
            }
            self.ack.at_once = true;
        }
        for (i, p) in self.paths.iter_mut().enumerate() {
            let before = p.tx.inflight();
            p.tx.forget_stream(id);
            self.inflight = self
                .inflight
                .saturating_sub(u64::from(before.saturating_sub(p.tx.inflight())));
            if !p.tx.has_donations() {
                self.donors &= !(1u64 << (i & 63));
            }
        }
        if self.several {
            for i in 0..self.paths.len() {
                self.refresh(i);
            }
        }
        if self.streams.len() == 0 {
            self.empty_since = now;
            self.close_due = now.saturating_add(TOMBSTONE_LIFE);
            self.close_tries = 0;
        }
        Some(stream)
    }

    /// A stream, for setting its attributes.
    pub fn stream(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.stream_mut(id.0)
    }

    /// Takes a WR into a stream and gives its number.
    pub fn post_send(&mut self, now: Time, id: StreamId, wr: SendWr) -> Result<u32, PostError> {
        let s = self.streams.stream_mut(id.0).ok_or(PostError::NoStream)?;
        let r = s.post(now, wr);
        self.touch(now, id.0);
        r
    }

    /// The QP was moved to another state.
    pub fn set_state(&mut self, now: Time, id: StreamId, state: State) {
        let Some(s) = self.streams.stream_mut(id.0) else {
            return;
        };
        s.set_state(now, state);
        if state == State::Rtr {
            // Whoever was told NOT_READY may go on.
            self.mark_dirty(id.0);
            if self.state == ConnectionState::Connecting {
                self.attempt.due = self.attempt.due.min(now);
            }
        }
        self.touch(now, id.0);
    }

    /// Receives were posted: `posted` are not bound yet, `None` is unknown.
    pub fn receives_changed(&mut self, now: Time, id: StreamId, posted: Option<u32>) {
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.receives_changed(now, posted);
            self.touch(now, id.0);
        }
    }

    /// A copy has ended.
    pub fn placed(&mut self, now: Time, token: Token, result: Placed, host: &mut dyn Host) {
        self.ack.placing = self.ack.placing.saturating_sub(1);
        let i = token.stream.0;
        if let Some(s) = self.streams.stream_of(i, token.generation) {
            s.placed(now, token, result, host);
            self.touch(now, i);
        }
    }

    /// Answer to [`Event::Read`].
    pub fn read_ready(&mut self, now: Time, id: StreamId, request: u32, result: Result<(), Fault>) {
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.read_ready(now, request, result);
            self.touch(now, id.0);
        }
    }

    /// Answer to [`Event::Atomic`]: the original value.
    pub fn atomic_done(
        &mut self,
        now: Time,
        id: StreamId,
        request: u32,
        result: Result<u64, Fault>,
    ) {
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.atomic_done(now, request, result);
            self.touch(now, id.0);
        }
    }

    /// Answer to [`Event::Invalidate`].
    pub fn invalidated(&mut self, now: Time, id: StreamId, result: Result<(), Fault>) {
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.invalidated(now, result);
            self.touch(now, id.0);
        }
    }

    /// Answer to [`Event::Local`].
    pub fn local_done(&mut self, now: Time, id: StreamId, wr: u32, status: Status) {
        if let Some(s) = self.streams.stream_mut(id.0) {
            s.local_done(now, wr, status);
            self.touch(now, id.0);
        }
    }

    /// The next thing for the driver to do.
    pub fn poll_event(&mut self, now: Time) -> Option<Event> {
        if core::mem::take(&mut self.event_up) {
            return Some(Event::ConnectionUp);
        }
        if let Some(e) = self.event_failed.take() {
            return Some(Event::ConnectionFailed(e));
        }
        if self.changed != 0 {
            let path = self.changed.trailing_zeros() as u8;
            self.changed &= self.changed.wrapping_sub(1);
            return Some(Event::PathChanged { path });
        }
        while let Some(i) = self.streams.first(List::Event) {
            let event = self.streams.stream_mut(i).and_then(|s| s.poll_event());
            match event {
                Some(e) => {
                    if matches!(e, Event::Release(_)) {
                        self.ack.placing = self.ack.placing.saturating_add(1);
                    }
                    return Some(e);
                }
                None => {
                    self.streams.delist(List::Event);
                    self.update(now, i);
                }
            }
        }
        core::mem::take(&mut self.event_closed).then_some(Event::ConnectionClosed)
    }

    /// The state of stream `i` may have changed in any way. Further changes until its events
    /// have been taken cost nothing here: [`Connection::poll_event`] looks when it has no more.
    fn touch(&mut self, now: Time, i: u32) {
        if self.streams.enlist(List::Event, i) {
            self.update(now, i);
        }
    }

    /// Puts stream `i` on the lists it belongs on.
    fn update(&mut self, now: Time, i: u32) {
        let Some(slot) = self.streams.slot_mut(i) else {
            return;
        };
        let Some(s) = slot.stream.as_deref_mut() else {
            return;
        };
        let [a, b] = s.take_dirty();
        let dirty = a || b;
        if dirty {
            slot.dirty = [slot.dirty[0] || a, slot.dirty[1] || b];
        }
        let sends = s.can_send(now);
        let mut timer = s.poll_timeout().unwrap_or(Time::MAX);
        let wait = s.poll_wait().unwrap_or(Time::MAX);
        if s.wants_query() {
            // Not sooner than `stream_timers` acts: an acknowledgement tells of paths first,
            // and of the stream, whose packets they were, right after.
            let wait = self
                .srtt
                .saturating_mul(2)
                .saturating_add(self.margin.get());
            timer = timer.min(now.saturating_add(wait));
        } else {
            slot.queries = [0; 2];
        }
        if dirty {
            self.streams.enlist(List::Dirty, i);
            self.ack_later(now);
        }
        if sends {
            self.streams.enlist(List::Send, i);
        }
        if timer != Time::MAX {
            self.streams.enlist(List::Timer, i);
            self.stream_timer = self.stream_timer.min(timer);
            self.stream_wait = self.stream_wait.min(wait);
        }
    }

    fn mark_dirty(&mut self, i: u32) {
        if let Some(slot) = self.streams.slot_mut(i) {
            slot.dirty = [true; 2];
            self.streams.enlist(List::Dirty, i);
            self.ack.at_once = true;
        }
    }

    /// Whether some stream waits for the peer or for being sent.
    fn has_work(&self) -> bool {
        self.streams.first(List::Send).is_some() || self.streams.first(List::Timer).is_some()
    }

    /// A random number that an off-path attacker cannot know.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(1);
        handshake::keyed_hash(&self.cfg.secret, &[self.random, self.cfg.seed])
    }

    /// A random number for a choice among paths and ports: whoever knows it gains nothing.
    fn choice(&mut self) -> u64 {
        if !self.cfg.repeat {
            return self.draw();
        }
        self.choices = self.choices.wrapping_add(1);
        let words = [self.cfg.seed, u64::from(self.choices)];
        handshake::keyed_hash(&self.ids.local_gid, &words)
            ^ handshake::keyed_hash(&self.ids.remote_gid, &[self.cfg.seed])
    }

    /// Paths in use, as a mask.
    fn path_mask(&self) -> u64 {
        match self.agreed.paths {
            64.. => u64::MAX,
            n => (1u64 << n).wrapping_sub(1),
        }
    }

    /// Bytes of a full packet, as windows count.
    fn packet_bytes(&self) -> u32 {
        self.agreed.payload_mtu.saturating_add(DATA_OVERHEAD as u32)
    }

    /// The connection is up with a peer that calls it `remote_cid`; both sides begin with
    /// fresh epochs. What was outstanding before is sent again by the streams.
    fn up(&mut self, now: Time, agreed: Negotiated, remote_cid: u64, peer_epoch: u16) {
        let again = self.remote_cid != 0;
        if again && !self.reattempt && self.first_epoch == self.opened_epoch {
            self.next_first_epoch();
        }
        self.state = ConnectionState::Up;
        self.reattempt = false;
        self.remote_cid = remote_cid;
        self.agreed = agreed;
        self.not_yet = 0;
        self.opened_epoch = self.first_epoch;
        let mask = self.path_mask();
        let packet = self.packet_bytes();
        let window = initial(agreed.paths.into(), agreed.payload_mtu, packet);
        for p in self.paths.iter_mut() {
            p.reopen(self.first_epoch, peer_epoch, window, packet);
        }
        // A controller may begin with another one.
        let window = self.paths.first().map_or(0, |p| p.window.bytes());
        self.good = mask;
        self.open = mask;
        self.load.fill(0);
        self.score.fill(0);
        self.lost = 0;
        self.donors = 0;
        self.probe = 0;
        self.overdue = 0;
        self.proven = 0;
        self.silent = 0;
        self.emptied = 0;
        *self.rescue = Rescue::default();
        self.home_probe = 0;
        self.homing = 0;
        self.inflight = 0;
        self.windows = u64::from(window).saturating_mul(u64::from(agreed.paths));
        self.newest = 0;
        self.path_timer = Time::MAX;
        self.introduce_paths(now);
        self.begin_planes(now, peer_epoch);
        self.ack.dirty = 0;
        self.ack.number = 0;
        self.ack.refused.clear();
        self.ack.replies.clear();
        self.begin_mtu_search(now);
        self.watch_idleness(now);
        for i in 0..self.streams.used() as u32 {
            if let Some(slot) = self.streams.slot_mut(i) {
                slot.ack_number = [0; 2];
                slot.queries = [0; 2];
                if let Some(s) = slot.stream.as_deref_mut() {
                    s.set_payload_mtu(agreed.payload_mtu);
                    if again {
                        s.resume(now);
                    }
                }
            }
            if again {
                self.mark_dirty(i);
            }
            self.touch(now, i);
        }
        self.counters.established = self.counters.established.wrapping_add(1);
        self.event_up = true;
    }

    /// Chooses the epoch with which the next incarnation begins.
    fn next_first_epoch(&mut self) {
        let newest = self
            .paths
            .iter()
            .map(|p| p.tx.epoch.wrapping_sub(self.opened_epoch))
            .max()
            .unwrap_or(0);
        // Far above what the running one may still open.
        self.first_epoch = self.opened_epoch.wrapping_add(newest).wrapping_add(256);
    }

    /// The peer may have lost the connection: asks it, while data goes on.
    fn suspect_peer(&mut self, now: Time) {
        const AGAIN: Time = 100_000_000;
        if self.reattempt || now.saturating_sub(self.reattempted) < AGAIN && self.reattempted != 0 {
            return;
        }
        self.reattempt = true;
        self.reattempted = now.max(1);
        self.next_first_epoch();
        let nonce = self.draw();
        self.attempt = Attempt::new(nonce, now);
    }

    /// The peer has no such connection any more: waits for it as at the beginning.
    fn go_down(&mut self, now: Time) {
        self.state = ConnectionState::Connecting;
        self.reattempt = false;
        self.attempt.due = self.attempt.due.max(now);
    }

    /// The peer lives anew: what its QPs were is gone.
    fn restart(&mut self, now: Time) {
        for i in 0..self.streams.used() as u32 {
            // A QP that the former life never answered may be meant for this one.
            let Some(slot) = self.streams.slot_mut(i).filter(|s| s.heard) else {
                continue;
            };
            slot.heard = false;
            if let Some(s) = slot.stream.as_deref_mut() {
                s.connection_lost(now);
                self.touch(now, i);
            }
        }
        self.tombstones.clear();
        self.tombstone_at = 0;
        self.event_failed = Some(ConnectionError::PeerRestarted);
    }

    /// There will be no connection.
    fn fail(&mut self, now: Time, why: ConnectionError) {
        self.state = ConnectionState::Failed;
        for i in 0..self.streams.used() as u32 {
            if let Some(s) = self.streams.stream_mut(i) {
                s.connection_lost(now);
                self.touch(now, i);
            }
        }
        self.event_failed = Some(why);
        if self.streams.len() == 0 {
            self.event_closed = true;
        }
    }

    /// Least time of silence that means something: a queue in front of the peer delays all
    /// paths, whatever was measured on the one that is silent.
    fn pause(&self) -> Time {
        let long = self.long_rtt.get();
        self.margin
            .pause()
            .max(long.saturating_add(long / 2).min(PAUSE_MAX))
    }

    fn first_rtt(&mut self, now: Time, rtt: Time) {
        for p in self.paths.iter_mut() {
            if !p.rtt.is_known() {
                p.rtt.sample(now, rtt);
            }
        }
        self.srtt = rtt.max(1);
    }

    /// Fills in what sends a packet over path `i`.
    fn address(&self, out: &mut Transmit, i: u32) {
        out.path = i as u8;
        if let Some(p) = self.paths.get(i as usize) {
            out.plane = p.plane;
            out.source_port = p.port;
            // Changes with the port, so that IPv6 fabrics see another flow as well.
            out.flow_label = (u32::from(p.port) << 4 ^ u32::from(p.tx.epoch)) & 0xf_ffff;
        }
    }

    /// Whether the peer has sent something since the last report, so that
    /// [`Connection::report`] is worth it.
    pub fn report_is_due(&self, now: Time) -> bool {
        self.inbound
            .iter()
            .any(|p| p.bytes != p.reported && now.saturating_sub(p.reported_at) >= REPORT)
    }

    /// Reports to the device's [`Shares`] what the peer has sent lately, and grants the peer
    /// its share of the inbound bandwidth with every acknowledgement from now on. For the only
    /// plane, or the first one; see [`Connection::report_on`].
    pub fn report(&mut self, now: Time, shares: &mut Shares) {
        self.report_on(now, 0, shares);
    }

    /// The share that the peer has granted, kbit/s, over all planes; 0 is no limit.
    pub fn share(&self) -> u32 {
        let granted = |p: &Plane| if p.paths != 0 { p.share } else { 0 };
        self.planes.iter().map(granted).sum()
    }

    /// State of the paths in use.
    pub fn paths(&self) -> impl Iterator<Item = PathInfo> + '_ {
        self.paths
            .iter()
            .take(usize::from(self.agreed.paths))
            .enumerate()
            .map(|(i, p)| PathInfo {
                path: i as u8,
                plane: p.plane,
                health: p.health,
                port: p.port,
                epoch: p.tx.epoch,
                window: p.window.bytes(),
                inflight: p.tx.inflight(),
                srtt: p.rtt.smoothed(),
                min_rtt: p.rtt.least().unwrap_or(0),
                packets: p.stats.packets,
                bytes: p.stats.bytes,
                resent: p.stats.resent,
                moved: p.stats.moved,
                received: p.stats.received,
                ce: p.stats.ce,
                failures: p.stats.failures,
                threshold: p.threshold,
            })
    }

    /// Sums of events.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Nothing is attached and the grace time is over: it may be dropped.
    pub fn is_idle(&self, now: Time) -> bool {
        self.streams.len() == 0 && now.saturating_sub(self.empty_since) >= TOMBSTONE_LIFE
    }

    /// Ends the connection now (the device goes): tells the peer once and is closed.
    pub fn close(&mut self, now: Time) {
        if self.state == ConnectionState::Up && !self.loopback {
            self.closing = Some((CloseKind::Agree, self.close_number));
        }
        for i in 0..self.streams.used() as u32 {
            if let Some(s) = self.streams.stream_mut(i) {
                s.connection_lost(now);
                self.touch(now, i);
            }
        }
        self.state = ConnectionState::Closed;
        self.event_closed = true;
    }
}

#[cfg(any(test, CONFIG_KUNIT = "y"))]
pub(crate) mod tests {
    use super::*;
    use core::mem::size_of;

    /// It passes through kernel stacks while it is made.
    #[cfg_attr(test, test)]
    pub(crate) fn memory_as_stated() {
        let size = size_of::<Connection>();
        assert!(size <= 1120, "{size} bytes");
    }

    /// What section 12 of PROTOCOL.md says: no more, and not much less.
    #[cfg_attr(test, test)]
    pub(crate) fn memory_of_all_parts() {
        let connection = size_of::<Connection>()
            + size_of::<Rescue>()
            + size_of::<Roster>()
            + size_of::<Rest>()
            + size_of::<Counters>()
            + size_of::<Plane>()
            + size_of::<Inbound>()
            + TOMBSTONES * size_of::<Tombstone>()
            + REFUSALS * size_of::<StreamBlock>()
            + REPLIES * size_of::<Reply>();
        // Beside the path itself, what the scheduler compares.
        let path = size_of::<Path>() + 2 * size_of::<u32>();
        let record = size_of::<Record>();
        // Slots and buckets double.
        let qp = 2 * (streams::SLOT_BYTES + size_of::<u32>());
        let fixed = Stream::memory(1, 1);
        let per_wr = Stream::memory(2, 1).abs_diff(fixed);
        let per_read = Stream::memory(1, 2).abs_diff(fixed);
        let stream = fixed - per_wr - per_read;
        for (name, is, said) in [
            ("connection", connection, CONNECTION_SAID),
            ("path", path, PATH_SAID),
            ("record", record, 32),
            ("slot of a QP", qp, SLOT_SAID),
            ("stream", stream, 22_400),
            ("WR", per_wr, 80),
            ("READ", per_read, 64),
        ] {
            let right = (said * 4).div_ceil(5)..=said;
            assert!(right.contains(&is), "{name}: {is} bytes, {said} stated");
        }
    }

    /// With `repeat`, choices follow from seed and addresses; what nobody may guess does not.
    #[cfg_attr(test, test)]
    pub(crate) fn choices_are_repeated_and_secrets_are_not() {
        let drawn = |secret: u8, seed, repeat| {
            let mut cfg = Config::new(4200);
            (cfg.secret, cfg.seed, cfg.repeat) = ([secret; 16], seed, repeat);
            let ids = Ids {
                local_cid: u64::from(secret),
                local_gid: [1; 16],
                remote_gid: [2; 16],
                dscp: 0,
            };
            let mut c = Connection::new(&cfg, ids, 0).expect("memory");
            ([c.choice(), c.choice(), u64::from(c.any_port())], c.draw())
        };
        let (one, secret) = drawn(1, 7, true);
        let (other, other_secret) = drawn(2, 7, true);
        assert_eq!(one, other);
        assert_ne!(secret, other_secret);
        assert_ne!(one[0], one[1]);
        assert_ne!(drawn(1, 8, true).0, one);
        assert_ne!(drawn(1, 7, false).0, drawn(2, 7, false).0);
    }

    const CONNECTION_SAID: usize = 10_240;
    const PATH_SAID: usize = 600;
    const SLOT_SAID: usize = 160;
}
