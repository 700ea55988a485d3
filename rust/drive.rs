// SPDX-License-Identifier: GPL-2.0

//! The one place that locks a connection, feeds the protocol core, drains it, unlocks, and
//! then sends, copies, completes and arms the timer.
//!
//! # Contexts
//!
//! | who | context | enters by |
//! | --- | --- | --- |
//! | received packets | softirq (`encap_rcv`) | [`receive`] |
//! | the inbox, end of a receive batch, more work than one round | softirq (bottom-half work) | [`BhWork::run`] |
//! | the connection's timer | softirq (hrtimer) | [`timer::Handler::expired`] |
//! | doorbell, modify, destroy | process | [`connect`] and the methods of [`Attachment`] |
//! | news of the device's planes | process | [`Table::planes_changed`] |
//! | memory for connections that are used, or not any more | process | `Keeper` |
//!
//! # Lock order
//!
//! QP state mutex → `Table::connecting` (both process only) → table of connections →
//! connection → shares, RQ or SRQ, list of the keeper → CQ. An inbox's lock is taken alone. All but
//! the mutexes are taken with softirqs off. Under the connection's lock nothing is allocated, freed,
//! copied to or from user memory, sent, or told to a program.
//!
//! # Receiving
//!
//! Packets with much payload go to the inbox of their connection, and its work item reads
//! them in batches: CRCs and copies of many under no lock, the core's part of all under one.
//! When no network card has chosen a CPU, but the one that sent the packets still has them
//! (veth, loopback), and they are more than one or two, the item runs on another CPU, so that both
//! ends of a connection inside of one machine work at the same time. Small packets are read where
//! they arrive, unless the inbox has packets that came before (a path's packets stay in order).
//!
//! # Sending
//!
//! A path's packets must leave in order, so one CPU at a time sends for a connection: the
//! one that has set [`State::sending`]. Whoever finds it set leaves his input in the core and
//! goes; the sender looks again before he clears it.
//!
//! # Memory
//!
//! What a CPU needs while it reads or sends ([`Reads`], [`Batch`]) is lent to it by the device
//! and is no connection's. A connection has few send records and little room for held packets
//! while it rests. When the core has too few, the device's keeper, a work item in process context,
//! makes more and exchanges them under the connection's lock; when nothing has moved for a while it
//! does the contrary. Without memory the connection goes on with what it has, and asks again later.
//!
//! # Who holds what, and how destruction waits
//!
//! Softirq holds `Arc`s only: the device's table holds each connection, a connection holds
//! the QPs attached to it, a queued work item, an armed timer and the keeper's list hold the
//! connection.
//! [`Attachment::disconnect`] takes the QP out under the lock, then waits until no copy for it is
//! running (`QpInner::copies`); after that nothing of the connection reaches the QP's
//! memory. A connection that leaves the table loses its timer; [`Table::shutdown`] stops timer
//! and work of those that are left when the device goes, and waits until none is alive, also
//! of those that had left before: nothing of them may run once the module has gone.
//! It takes `Table::connecting`, which [`Table::planes_changed`] holds: no news comes afterwards.
//!
//! A namespace may end while a device that was in it is still on its way out, and routes of IPv6
//! lie in the namespace. So routes go earlier: when the port closes, and with a connection that
//! leaves the table ([`Table::forget_routes`]).
//!
//! # Planes
//!
//! While the device has one plane and the peer has announced none, the core knows of one, too,
//! and nothing here looks for others. Memory for more is given to the core in process context,
//! by whoever holds `Table::connecting`: when the device gets a plane, when a connection of a
//! device with planes is made, and when a peer has announced its own (which softirq only notes).

#![forbid(unsafe_code)]

pub use crate::proto::directory::Key;
use crate::{
    kernel_ext::{
        bh::{self, BhWork},
        lend::Pool,
        rcu,
        timer::{self, Timer},
    },
    mem::{Frags, Recent, Refused},
    net::{self, Flow, Leg, Skb, SkbQueue, XmitError},
    os,
    proto::{
        api::{
            Event, Fault, Host, Payload, Placed, Placement, Receive, RxInfo, SendWr, StreamId,
            Time, Token, Transmit,
        },
        connection::{self, Connection},
        directory::{Directory, Named, Room, INDEX_BITS, INDEX_MASK},
        stream,
        wire::{self, Body, Packet, PlaneAddress, Type, PLANES_MAX},
    },
    verbs::{
        device::{Choice, DeviceInner},
        extension::History,
        qp::{CopyPlan, Notify, QpInner},
    },
};
use ::core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use ::kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{Arc, Mutex, SpinLock},
    time::{delay::fsleep, Delta},
};

/// Packets that are taken out of the core in one locked round.
const BATCH: usize = 16;

/// Held packets that are copied in one round.
const JOBS: usize = 16;

/// Events handled in one locked round.
const EVENTS: usize = 128;

/// Rounds before a CPU gives way to other softirqs (bottom-half work takes over): so many packets
/// a veth or loopback device delivers at once, and the CPU that reads them begins while this one
/// sends the next. With 32 rounds a whole window went first.
const ROUNDS: usize = 4;

/// Packets from this size on, in bytes, are read by the work item.
const BULK: u32 = 1024;

/// Packets that wait in an inbox at the most; further ones are dropped.
const INBOX: usize = 1024;

/// When so many wait that software delivered on the sender's CPU, another CPU reads them: a train
/// of packets, behind which more may come. Fewer are read sooner than another CPU has been woken.
const CROWD: usize = 3;

/// Packets read in one round.
const READS: usize = 32;

/// Rounds of them before the connection acknowledges and sends.
const READ_ROUNDS: usize = 4;

/// As often the work item looks for more before it gives way.
const WORK_ROUNDS: usize = 4;

/// Packets held for one connection at the most (rule 15 of PROTOCOL.md), and while it rests.
const HELD: usize = 256;
const HELD_AT_REST: usize = 32;

/// Without memory for more of something it is asked for again after this time, ns.
const MEMORY_AGAIN: Time = 100_000_000;

/// Answers to those who have proven nothing: 10,000 a second, and so many at once. A host that
/// is flooded does not spend its time on them.
const ANSWER_EVERY: Time = 100_000;
const ANSWERS_AT_ONCE: Time = 256;

/// WQEs copied from a ring in one locked round.
const FETCH: usize = 64;

/// The connections of a device.
#[pin_data]
pub struct Table {
    /// When the next answer to a stranger is due at the rate that is allowed, ns.
    answers: AtomicU64,
    /// Connections that were made.
    made: AtomicU64,
    /// Connections that exist, in the table or not any more.
    living: AtomicUsize,
    /// What CPUs need while they send and read.
    tools: Tools,
    keeper: Arc<Keeper>,
    /// Held while a connection is looked up or made, so that a pair gets one.
    #[pin]
    connecting: Mutex<()>,
    #[pin]
    slots: SpinLock<Slots>,
}

struct Slots {
    conns: Directory<Arc<Conn>>,
    /// No further connections: the device goes.
    closed: bool,
}

impl Named for Arc<Conn> {
    fn id(&self) -> u64 {
        self.cid
    }

    fn key(&self) -> &Key {
        &self.key
    }
}

impl Table {
    /// An empty table.
    pub fn new(tools: Tools, keeper: Arc<Keeper>) -> impl PinInit<Self> {
        let hash_key = u128::from(net::random_u64()) << 64 | u128::from(net::random_u64());
        pin_init!(Self {
            answers: AtomicU64::new(0),
            made: AtomicU64::new(0),
            living: AtomicUsize::new(0),
            tools,
            keeper,
            connecting <- new_mutex!(()),
            slots <- new_spinlock!(Slots {
                conns: Directory::new(hash_key.to_ne_bytes()),
                closed: false,
            }),
        })
    }

    /// Whether one more answer to somebody who has proven nothing may go.
    fn may_answer(&self, now: Time) -> bool {
        let earliest = now.saturating_sub(ANSWER_EVERY * ANSWERS_AT_ONCE);
        let next = |due: Time| {
            let due = due.max(earliest);
            (due <= now).then(|| due.saturating_add(ANSWER_EVERY))
        };
        self.answers
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .is_ok()
    }

    fn by_id(&self, cid: u64) -> Option<Arc<Conn>> {
        self.slots.lock().conns.by_id(cid).cloned()
    }

    fn by_key(&self, key: &Key) -> Option<Arc<Conn>> {
        self.slots.lock().conns.by_key(key).cloned()
    }

    /// Calls `f` for each connection, unlocked.
    pub fn for_each(&self, mut f: impl FnMut(&Arc<Conn>)) {
        let mut i = 0;
        loop {
            let next = {
                let _bh = bh::disable();
                let slots = self.slots.lock();
                if i >= slots.conns.places() {
                    return;
                }
                slots.conns.at(i).cloned()
            };
            if let Some(conn) = next {
                f(&conn);
            }
            i += 1;
        }
    }

    fn remove(&self, conn: &Conn) {
        // Once it is out of the table nobody finds its routes.
        conn.flow.forget_routes();
        let taken = {
            let _bh = bh::disable();
            let taken = self.slots.lock().conns.remove(conn.cid);
            taken
        };
        if let Some(conn) = taken {
            conn.device.counters.ended(&conn.counters());
            conn.stop_timer();
        }
    }

    /// Ends every connection and lets none be made any more; waits until there is none.
    /// Process context; the device's QPs are gone, and nothing is received any more.
    pub fn shutdown(&self) {
        {
            let _serial = self.connecting.lock();
            let _bh = bh::disable();
            self.slots.lock().closed = true;
        }
        let mut from = 0;
        loop {
            let conn = {
                let _bh = bh::disable();
                let taken = self.slots.lock().conns.take_from(&mut from);
                taken
            };
            let Some(conn) = conn else { break };
            conn.stop();
        }
        // Every connection has stopped, so none goes to the keeper any more.
        self.keeper.stop();
        // Those that had left the table: their work items are about to run, or a timer that was
        // armed while its handler ran is about to expire.
        while self.living.load(Ordering::Acquire) != 0 {
            fsleep(Delta::from_millis(1));
        }
        // The last of them may just be letting go of the device, in softirq. That must not be what
        // frees it: the locks of its tables are taken with softirqs on elsewhere.
        rcu::synchronize();
    }

    /// Ends every connection with a word to the peer, which need not find out by itself. The
    /// device's QPs are gone, and the port is still open. Process context.
    pub fn part(&self) {
        self.for_each(|conn| {
            let _bh = bh::disable();
            conn.state.lock().core.close(net::now());
            conn.run();
        });
    }

    /// Has all connections give up their routes; those that are not in the table any more have
    /// none. The port is closed: nothing is sent any more. Process context.
    pub fn forget_routes(&self) {
        self.for_each(|conn| conn.flow.forget_routes());
    }

    /// Tells all connections which planes there are. Process context.
    pub fn planes_changed(&self) {
        let _serial = self.connecting.lock();
        // None is there when the table is closed, and none is added meanwhile.
        self.for_each(|conn| {
            if conn.update_planes() {
                let _bh = bh::disable();
                conn.run();
            }
        });
    }
}

/// A connection's hold on its device, which counts it as long as it lives.
struct Owner(Arc<DeviceInner>);

impl Owner {
    fn new(device: &Arc<DeviceInner>) -> Self {
        device.table.living.fetch_add(1, Ordering::Relaxed);
        Self(device.clone())
    }
}

impl ::core::ops::Deref for Owner {
    type Target = Arc<DeviceInner>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.table.living.fetch_sub(1, Ordering::Release);
    }
}

/// A connection as the driver sees it.
#[pin_data]
pub struct Conn {
    /// Id that the peer writes into its packets; finds this object.
    pub cid: u64,
    /// What it connects.
    pub key: Key,
    /// Names it for programs, from 1: the id is the peer's to know.
    pub number: u64,
    flow: Flow,
    /// The core has memory for more than one plane. Changed by whoever holds `connecting`.
    has_planes: AtomicBool,
    /// The peer has announced planes.
    peer_has_planes: AtomicBool,
    #[pin]
    state: SpinLock<State>,
    /// Packets in the inbox and those that are just being read out of it.
    waiting: AtomicUsize,
    #[pin]
    inbox: SpinLock<Inbox>,
    #[pin]
    timer: Timer<Self>,
    #[pin]
    work: bh::Item<Self>,
    /// The one behind it in the keeper's list, whose lock is held when this one is taken.
    #[pin]
    next: SpinLock<Option<Arc<Conn>>>,
    /// Dropped last: then there is nothing left of it.
    device: Owner,
}

/// Packets that have arrived and are not read yet.
struct Inbox {
    queue: SkbQueue,
    /// Somebody reads or is about to, and will look again.
    reading: bool,
    /// The work item runs.
    running: bool,
}

/// Packets that are being read: room for [`READS`].
type Reads = os::Vec<Arrival>;

/// What CPUs need while they send and read, for as many as may do so at once.
pub struct Tools {
    batches: Pool<Batch>,
    reads: Pool<Reads>,
}

impl Tools {
    /// `ENOMEM`.
    pub fn new() -> Result<Self> {
        Ok(Self {
            batches: Pool::new(Batch::new)?,
            reads: Pool::new(|| Ok(os::try_box(os::Vec::with_capacity(READS)?)?))?,
        })
    }
}

/// A packet that is being read, in a batch of others.
struct Arrival {
    /// `None` once it is held.
    skb: Option<Skb>,
    /// Where the payload begins.
    skip: u32,
    /// Its copy, and how that ended.
    copy: Option<(Placement, CopyPlan)>,
    done: Placed,
    /// Not used.
    dropped: Option<wire::Drop>,
}

/// What the connection's lock guards.
struct State {
    /// In memory of its own: it is too large to pass through the stack again and again.
    core: os::Box<Connection>,
    /// The QP of each stream.
    qps: os::Vec<Option<Arc<QpInner>>>,
    held: Held,
    /// What has become of its paths.
    history: History,
    /// Somebody sends; see the top of this file.
    sending: bool,
    /// Input came while somebody else was sending.
    more: bool,
    /// What the timer is armed for; `Time::MAX` is "not".
    armed: Time,
    /// The device goes or the peers have parted: no timer any more.
    stopped: bool,
    /// The keeper looks after the memory, or is about to.
    kept: bool,
    /// There was no memory: not before then.
    memory_again: Time,
}

impl State {
    /// Whether there should be more, or less, memory than there is.
    fn wants_memory(&self, now: Time) -> bool {
        (self.held.wanted(&self.core).is_some() || self.core.wants_records().is_some())
            && now >= self.memory_again
    }
}

/// Received packets that wait for what is ahead of them.
struct Held {
    packets: os::Vec<HeldPacket>,
    /// There was no room for one.
    short: bool,
}

/// A received packet and where its payload begins.
struct HeldPacket {
    token: Token,
    skip: u32,
    skb: Skb,
}

impl Held {
    /// Whether one more has room.
    fn has_room(&mut self) -> bool {
        let room = self.packets.len() < self.packets.capacity();
        self.short |= !room;
        room
    }

    /// For how many packets there should be room, when there is another one: for all that may be,
    /// once there was too little, and for few while `core` is idle.
    fn wanted(&self, core: &Connection) -> Option<usize> {
        let have = self.packets.capacity();
        if self.short && have < HELD {
            Some(HELD)
        } else {
            (have > HELD_AT_REST && core.is_unused() && self.packets.is_empty())
                .then_some(HELD_AT_REST)
        }
    }

    /// Moves into other memory, if that is enough, and leaves the one that is not needed in its
    /// place.
    fn exchange(&mut self, memory: &mut os::Vec<HeldPacket>) {
        self.short = false;
        if memory.capacity() < self.packets.len() {
            return;
        }
        while let Some(packet) = self.packets.pop() {
            // There is room.
            let _ = memory.push(packet);
        }
        core::mem::swap(memory, &mut self.packets);
    }

    fn take(&mut self, token: &Token) -> Option<HeldPacket> {
        let i = self.packets.iter().position(|p| p.token == *token)?;
        // The last element takes the place of the one that goes.
        let last = self.packets.pop()?;
        match self.packets.get_mut(i) {
            Some(slot) => Some(core::mem::replace(slot, last)),
            None => Some(last),
        }
    }
}

/// One packet on its way out.
struct Slot {
    tx: Transmit,
    /// Its way, when it is not that of the flow's own addresses.
    leg: Leg,
    frags: Frags,
    /// A queue refused it.
    unsent: bool,
    /// Bytes of header and payload.
    bytes: u64,
}

/// One deferred copy.
struct Job {
    placement: Placement,
    packet: HeldPacket,
    plan: CopyPlan,
    done: Placed,
}

/// What a CPU that sends carries from the locked part of a round to the unlocked one.
struct Batch {
    slots: os::Vec<Slot>,
    used: usize,
    jobs: os::Vec<Job>,
    /// Held packets to be freed outside the lock.
    trash: os::Vec<HeldPacket>,
    notify: Notify,
    ended: bool,
}

impl Batch {
    /// Out of line, as [`Conn::new`].
    #[inline(never)]
    fn new() -> Result<os::Box<Self>> {
        Ok(os::try_box(Self {
            slots: os::Vec::from_fn(BATCH, |_| Slot {
                tx: Transmit::new(),
                leg: Leg::NONE,
                frags: Frags::new(),
                unsent: false,
                bytes: 0,
            })?,
            used: 0,
            jobs: os::Vec::with_capacity(JOBS)?,
            trash: os::Vec::with_capacity(JOBS)?,
            notify: Notify::new()?,
            ended: false,
        })?)
    }
}

/// The core's questions, answered from the QPs. Lives as long as the lock is held.
struct Answers<'a> {
    qps: &'a [Option<Arc<QpInner>>],
    held: &'a mut Held,
}

impl Host for Answers<'_> {
    fn bind_receive(&mut self, stream: StreamId, rmsn: u32) -> Option<u64> {
        qp_of(self.qps, stream)?.bind_receive(rmsn)
    }

    fn receives_posted(&mut self, stream: StreamId) -> Option<u32> {
        qp_of(self.qps, stream)?.receives_posted()
    }

    fn may_hold(&mut self, _bytes: u32) -> bool {
        self.held.has_room()
    }
}

fn qp_of(qps: &[Option<Arc<QpInner>>], stream: StreamId) -> Option<&Arc<QpInner>> {
    qps.get(stream.0 as usize)?.as_ref()
}

/// A received packet. Softirq, softirqs off; `skb` starts at the transport header, and as
/// much of it as a header can take is linear.
pub fn receive(device: &Arc<DeviceInner>, skb: Skb) {
    let (kind, conn) = match wire::peek(skb.linear()) {
        Some((kind, cid)) => (Some(kind), device.table.by_id(cid)),
        None => (None, None),
    };
    if let Some(conn) = &conn {
        // Others tell what has arrived at the peer, or are answers: they may overtake.
        let ordered = matches!(
            kind,
            Some(Type::Data | Type::Probe | Type::Query | Type::Close)
        );
        if ordered && (skb.len() >= BULK || conn.waiting.load(Ordering::Acquire) != 0) {
            return conn.put(skb);
        }
    }
    let packet = match Packet::parse(skb.linear()) {
        Ok(packet) => packet,
        Err(why) => return device.count_drop(why),
    };
    if let Some(key) = packet.handshake_key() {
        // Who names others than those it comes from and goes to is not answered, and heard by
        // nobody.
        if key.source != skb.source() || key.destination != skb.destination() {
            return device.count_drop(wire::Drop::Field);
        }
    }
    let conn = conn.or_else(|| device.table.by_key(&Key::from(packet.handshake_key()?)));
    let has_crc = packet.always_checksum() || conn.as_ref().is_none_or(|c| c.flow.has_crc());
    if !is_intact(&skb, has_crc) {
        return device.count_drop(wire::Drop::Crc);
    }
    let Some(conn) = conn else {
        return reply_without_state(device, &packet, &skb);
    };
    // Each asks for an answer, and anybody can send them.
    if matches!(packet.body(), Body::Init(_)) && !device.table.may_answer(net::now()) {
        return device.count_drop(wire::Drop::NoConnection);
    }
    // Somebody waits for this one: it does not wait for the end of the batch.
    let urgent = match packet.body() {
        Body::Data(path, _) => path.ack_request,
        Body::Ack(_) => true,
        _ => false,
    };
    let mut arrival = Arrival::new(skb);
    {
        let mut state = conn.state.lock();
        arrival.accept(&mut state, net::now());
    }
    if arrival.copy(&mut Recent::new(&device.regions)) {
        let mut state = conn.state.lock();
        arrival.placed(&mut state, net::now());
    }
    match arrival.dropped {
        Some(why) => device.count_drop(why),
        None if kind == Some(Type::Planes) => conn.peer_has_told(),
        None => {}
    }
    drop(arrival);
    conn.wake(urgent);
}

/// Whether the packet has the checksum that was agreed on, and it is right. (The stack has
/// checked that of UDP, if there is one.)
fn is_intact(skb: &Skb, has_crc: bool) -> bool {
    if !has_crc {
        return skb.has_udp_checksum();
    }
    wire::crc_of(skb.linear()).is_some_and(|crc| skb.check_crc(wire::CRC_OFFSET, crc))
}

impl Arrival {
    fn new(skb: Skb) -> Self {
        Self {
            skb: Some(skb),
            skip: 0,
            copy: None,
            done: Placed::Ok,
            dropped: None,
        }
    }

    /// Sees to it that the packet is dropped when it is damaged.
    fn check(&mut self, has_crc: bool) {
        if !self.skb.as_ref().is_some_and(|skb| is_intact(skb, has_crc)) {
            self.dropped = Some(wire::Drop::Crc);
        }
    }

    /// Gives the packet, unless it was found damaged, to the core.
    fn accept(&mut self, state: &mut State, now: Time) {
        let Some(skb) = self.skb.take().filter(|_| self.dropped.is_none()) else {
            return;
        };
        let State {
            core, qps, held, ..
        } = state;
        let received = Packet::parse(skb.linear()).and_then(|packet| {
            self.skip = packet.header_len() as u32;
            let info = RxInfo {
                ce: skb.ce(),
                plane: skb.plane(),
                payload_len: skb.len().saturating_sub(self.skip),
            };
            let mut host = Answers { qps, held };
            core.receive(now, &packet, &info, &mut host)
        });
        let placement = match received {
            Ok(Receive::Place(placement)) => placement,
            Ok(Receive::Hold(placement)) => {
                // A relaxed target has no order to keep: it is copied at once.
                let relaxed = qp_of(qps, placement.token.stream)
                    .is_some_and(|qp| qp.target_is_relaxed(&placement));
                if !relaxed {
                    let packet = HeldPacket {
                        token: placement.token,
                        skip: self.skip,
                        skb,
                    };
                    // There is room: `may_hold` has looked.
                    self.skb = held.packets.push(packet).err().map(|p| p.skb);
                    return;
                }
                placement
            }
            Ok(Receive::Done) => {
                self.skb = Some(skb);
                return;
            }
            Err(why) => {
                self.dropped = Some(why);
                self.skb = Some(skb);
                return;
            }
        };
        self.skb = Some(skb);
        match qp_of(qps, placement.token.stream) {
            Some(qp) => self.copy = Some((placement, qp.plan())),
            None => {
                // The core has just found the stream, and its QP goes together with it.
                let mut host = Answers { qps, held };
                let fault = Placed::Fault(Fault::Operation);
                core.placed(now, placement.token, fault, &mut host);
            }
        }
    }

    /// Copies the payload; no lock is held. False: there is nothing to copy.
    fn copy(&mut self, regions: &mut Recent<'_>) -> bool {
        match (&self.copy, &self.skb) {
            (Some((placement, plan)), Some(skb)) => {
                self.done = plan.copy(skb, self.skip, placement, regions);
                true
            }
            _ => false,
        }
    }

    /// Tells the core that the payload has been copied.
    fn placed(&self, state: &mut State, now: Time) {
        let Some((placement, _)) = &self.copy else {
            return;
        };
        let mut host = Answers {
            qps: &state.qps,
            held: &mut state.held,
        };
        state
            .core
            .placed(now, placement.token, self.done, &mut host);
    }
}

/// Answers what concerns no connection, without keeping anything.
/// Out of line: it has a packet of its own on the stack, which every received packet would
/// have to pay for.
#[inline(never)]
fn reply_without_state(device: &Arc<DeviceInner>, packet: &Packet<'_>, skb: &Skb) {
    let mut tx = Transmit::new();
    let seen = wire::HandshakeKey {
        source: skb.source(),
        destination: skb.destination(),
        dscp: skb.traffic_class() >> 2,
    };
    let now = net::now();
    let answered = connection::stateless_reply(packet, &seen, &device.secret, now, &mut tx)
        && device.table.may_answer(now);
    // An Init that is answered has done its work; anything else is lost, answered or not.
    if !answered || !matches!(packet.body(), Body::Init(_)) {
        device.count_drop(wire::Drop::NoConnection);
    }
    if !answered {
        return;
    }
    tx.source_port = skb.source_port();
    // A reply that cannot be sent is as good as lost; the peer asks again.
    let _ = Flow::answering(&device.port, skb).xmit(&tx);
}

impl Conn {
    /// A connection's core. Out of line: it passes through this frame, and where softirqs are
    /// switched on again they run on top of the caller's.
    #[inline(never)]
    fn new_core(config: &connection::Config, ids: connection::Ids) -> Result<os::Box<Connection>> {
        Ok(os::try_box_with(|| {
            Connection::new(config, ids, net::now())
        })?)
    }

    /// Out of line for the same reason.
    #[inline(never)]
    fn new(
        device: &Arc<DeviceInner>,
        cid: u64,
        key: Key,
        flow: Flow,
        choice: Choice,
    ) -> Result<Arc<Self>> {
        let ids = connection::Ids {
            local_cid: cid,
            local_gid: key.local,
            remote_gid: key.remote,
            dscp: key.dscp,
        };
        let state = State {
            core: Self::new_core(&device.connection_config(&flow, choice), ids)?,
            qps: os::Vec::new(),
            held: Held {
                packets: os::Vec::with_capacity(HELD_AT_REST)?,
                short: false,
            },
            history: History::new()?,
            sending: false,
            more: false,
            armed: Time::MAX,
            stopped: false,
            kept: false,
            memory_again: 0,
        };
        let inbox = Inbox {
            queue: SkbQueue::new(),
            reading: false,
            running: false,
        };
        Arc::pin_init(
            pin_init!(Self {
                cid,
                key,
                number: device.table.made.fetch_add(1, Ordering::Relaxed) + 1,
                flow,
                has_planes: AtomicBool::new(false),
                peer_has_planes: AtomicBool::new(false),
                state <- new_spinlock!(state),
                waiting: AtomicUsize::new(0),
                inbox <- new_spinlock!(inbox),
                timer <- Timer::new(),
                work <- bh::Item::new(),
                next <- new_spinlock!(None),
                device: Owner::new(device),
            }),
            GFP_KERNEL,
        )
    }

    /// The peer has told about its planes. The first time memory is needed for them.
    fn peer_has_told(&self) {
        if !self.peer_has_planes.swap(true, Ordering::Relaxed)
            && !self.has_planes.load(Ordering::Relaxed)
        {
            self.device.port.mark();
        }
    }

    /// Tells the core which planes the device has. Returns whether it may have something to send
    /// now. Process context; the caller holds `connecting`.
    fn update_planes(&self) -> bool {
        let mut list = [PlaneAddress::default(); PLANES_MAX];
        let Some((count, set)) = self.flow.planes(&mut list) else {
            return false;
        };
        let mut memory = None;
        if !self.has_planes.load(Ordering::Relaxed) {
            if !set && !self.peer_has_planes.load(Ordering::Relaxed) {
                return false;
            }
            // Without memory it stays on the plane it has, until there are other news.
            memory = Connection::plane_memory().ok();
            if memory.is_none() {
                return false;
            }
            self.has_planes.store(true, Ordering::Relaxed);
        }
        let list = list.get(..count).unwrap_or(&[]);
        let old = {
            let _bh = bh::disable();
            let mut state = self.state.lock();
            if state.stopped {
                return false;
            }
            let old = memory.map(|memory| state.core.allow_planes(memory));
            state.core.set_planes(net::now(), list);
            old
        };
        // Its memory is freed outside the lock.
        drop(old);
        true
    }

    /// What it has counted. Any context, without its lock.
    pub fn counters(&self) -> connection::Counters {
        let _bh = bh::disable();
        let counters = *self.state.lock().core.counters();
        counters
    }

    /// It is in the table no more: from now on nothing happens by itself. QPs that are still
    /// attached, to a connection that has failed, are flushed by work and verbs.
    fn stop_timer(self: &Arc<Self>) {
        {
            let _bh = bh::disable();
            self.state.lock().stopped = true;
        }
        timer::cancel(self);
    }

    /// Stops timer and work for good. Process context.
    fn stop(self: &Arc<Self>) {
        let (held, qps) = {
            let _bh = bh::disable();
            let mut state = self.state.lock();
            state.stopped = true;
            (
                core::mem::take(&mut state.held.packets),
                core::mem::take(&mut state.qps),
            )
        };
        drop((held, qps));
        timer::cancel_sync(self);
        bh::cancel_sync(self);
    }

    /// Puts a packet into the inbox. Softirq.
    fn put(self: &Arc<Self>, skb: Skb) {
        let software = !skb.has_queue();
        let (idle, crowd, refused) = {
            let mut inbox = self.inbox.lock();
            let idle = !core::mem::replace(&mut inbox.reading, true);
            if inbox.queue.len() < INBOX {
                self.waiting.fetch_add(1, Ordering::Release);
                inbox.queue.push(skb);
                let crowd = inbox.queue.len() == CROWD && !inbox.running;
                (idle, crowd && software, None)
            } else {
                (idle, false, Some(skb))
            }
        };
        if refused.is_some() {
            self.device.counters.drop_backlog();
        }
        if idle {
            bh::queue(self);
        } else if crowd {
            bh::move_elsewhere(self, (self.cid >> INDEX_BITS) as u32);
        }
    }

    /// Reads what is in the inbox. The work item only, which `has_read` ends.
    fn read(&self) {
        // Others have them all: it is tried again, as with what comes meanwhile.
        let Some(mut batch) = self.device.table.tools.reads.take() else {
            return;
        };
        self.inbox.lock().running = true;
        for _ in 0..READ_ROUNDS {
            {
                let mut inbox = self.inbox.lock();
                while batch.len() < READS {
                    let Some(skb) = inbox.queue.pop() else { break };
                    // There is room.
                    let _ = batch.push(Arrival::new(skb));
                }
            }
            if batch.is_empty() {
                break;
            }
            self.read_batch(&mut batch);
            self.waiting.fetch_sub(batch.len(), Ordering::Release);
            batch.clear();
        }
        self.inbox.lock().running = false;
    }

    /// Ends the reading when nothing is left; otherwise somebody has to read again.
    fn has_read(&self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.reading = !inbox.queue.is_empty();
        !inbox.reading
    }

    fn read_batch(&self, batch: &mut [Arrival]) {
        let has_crc = self.flow.has_crc();
        for arrival in batch.iter_mut() {
            arrival.check(has_crc);
        }
        {
            let mut state = self.state.lock();
            let now = net::now();
            for arrival in batch.iter_mut() {
                arrival.accept(&mut state, now);
            }
        }
        let mut copies = false;
        let mut regions = Recent::new(&self.device.regions);
        for arrival in batch.iter_mut() {
            copies |= arrival.copy(&mut regions);
            if let Some(why) = arrival.dropped {
                self.device.count_drop(why);
            }
        }
        drop(regions);
        if copies {
            let mut state = self.state.lock();
            let now = net::now();
            for arrival in batch.iter() {
                arrival.placed(&mut state, now);
            }
        }
    }

    /// Sees to it that what has arrived takes effect: now, or at the end of the batch of
    /// packets that it came with. Softirq.
    fn wake(self: &Arc<Self>, urgent: bool) {
        if urgent {
            self.run();
        } else {
            bh::queue(self);
        }
    }

    /// Drains the core: completes, sends, copies what was held, until nothing is left or
    /// somebody else does it already. Softirqs are off.
    fn run(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.sending {
            state.more = true;
            return;
        }
        let Some(mut batch) = self.device.table.tools.batches.take() else {
            // Others have them all: soon.
            drop(state);
            return bh::queue(self);
        };
        state.sending = true;
        for _ in 0..ROUNDS {
            state.more = false;
            let now = net::now();
            let mut busy = self.events(&mut state, &mut batch, now);
            busy |= self.fill(&mut state, &mut batch, now);
            if !busy && !state.more {
                self.rest(state, now);
                return;
            }
            drop(state);

            batch.notify.deliver();
            batch.trash.clear();
            let mut regions = Recent::new(&self.device.regions);
            for job in batch.jobs.iter_mut() {
                let packet = &job.packet;
                job.done = job
                    .plan
                    .copy(&packet.skb, packet.skip, &job.placement, &mut regions);
            }
            drop(regions);
            self.send(&mut batch);
            if core::mem::take(&mut batch.ended) {
                self.device.table.remove(self);
            }

            state = self.state.lock();
            let State {
                core, qps, held, ..
            } = &mut *state;
            let now = net::now();
            for job in batch.jobs.iter() {
                let mut host = Answers { qps, held };
                core.placed(now, job.placement.token, job.done, &mut host);
            }
            for slot in batch.slots.iter().take(batch.used) {
                if slot.unsent {
                    core.transmit_failed(now, &slot.tx);
                }
            }
        }
        // Enough for one go: others want the CPU as well.
        state.sending = false;
        self.keep(&mut state, net::now());
        drop(state);
        // Their QPs may wait for that.
        batch.jobs.clear();
        bh::queue(self);
    }

    /// Goes to the keeper when it needs other memory than it has.
    fn keep(self: &Arc<Self>, state: &mut State, now: Time) {
        if state.wants_memory(now) && !state.kept && !state.stopped {
            state.kept = true;
            self.device.table.keeper.add(self);
        }
    }

    /// Ends a run: gives the right to send back and arms the timer.
    fn rest(
        self: &Arc<Self>,
        mut state: ::kernel::sync::lock::Guard<
            '_,
            State,
            ::kernel::sync::lock::spinlock::SpinLockBackend,
        >,
        now: Time,
    ) {
        state.sending = false;
        if state.stopped {
            return;
        }
        self.keep(&mut state, now);
        match state.core.wake_at(now) {
            // A timer that fires early finds nothing to do and is armed again; only an
            // earlier time is worth touching the hardware for.
            Some(at) if at < state.armed => {
                state.armed = at;
                timer::arm(self, at);
            }
            _ => {}
        }
    }

    /// Handles the core's events until there are none or the batch is full. Returns whether
    /// there is something to do outside the lock, or more to come.
    fn events(&self, state: &mut State, batch: &mut Batch, now: Time) -> bool {
        let State {
            core,
            qps,
            held,
            history,
            ..
        } = state;
        batch.jobs.clear();
        let mut any = false;
        for _ in 0..EVENTS {
            if batch.jobs.len() == JOBS || batch.trash.len() == JOBS || batch.notify.is_full() {
                return true;
            }
            let Some(event) = core.poll_event(now) else {
                return any;
            };
            any = true;
            match event {
                Event::PathChanged { path } => {
                    path_changed(core, qps, history, batch, now, path);
                    continue;
                }
                Event::ConnectionUp => history.begin(core.paths()),
                _ => {}
            }
            self.event(core, qps, held, batch, now, event);
        }
        true
    }

    fn event(
        &self,
        core: &mut Connection,
        qps: &[Option<Arc<QpInner>>],
        held: &mut Held,
        batch: &mut Batch,
        now: Time,
        event: Event,
    ) {
        match event {
            Event::ConnectionUp => {
                let bare = core.crc() && (!self.flow.is_ipv6() || core.zero_checksum6());
                let within = core.peer_instance().is_some_and(net::is_of_this_machine);
                self.flow.set_integrity(core.crc(), !bare, within);
                return;
            }
            Event::ConnectionFailed(why) => return self.device.connection_failed(&self.key, why),
            Event::ConnectionClosed => {
                batch.ended = true;
                return;
            }
            Event::Discard(token) => {
                if let Some(packet) = held.take(&token) {
                    // `events` has made sure of the room.
                    let _ = batch.trash.push(packet);
                }
                return;
            }
            _ => {}
        }
        let Some(qp) = stream_of(&event).and_then(|s| qp_of(qps, s)) else {
            return;
        };
        match event {
            Event::SendDone { wr, status, .. } => qp.complete_send(wr, status, &mut batch.notify),
            Event::RecvDone { .. } => qp.complete_recv(&event, &mut batch.notify),
            Event::Invalidate { stream, rkey } => {
                core.invalidated(now, stream, qp.invalidate(rkey));
            }
            Event::Read {
                stream,
                request,
                va,
                rkey,
                length,
            } => core.read_ready(
                now,
                stream,
                request,
                qp.read_source(request, va, rkey, length),
            ),
            Event::ReadReleased { request, .. } => qp.release_read(request),
            Event::Atomic {
                stream,
                request,
                opcode,
                va,
                rkey,
                compare_add,
                swap,
            } => {
                let result = qp.atomic(opcode, va, rkey, compare_add, swap);
                core.atomic_done(now, stream, request, result);
            }
            Event::Local { stream, wr } => core.local_done(now, stream, wr, qp.local(wr)),
            Event::Release(placement) => {
                if let Some(packet) = held.take(&placement.token) {
                    let plan = qp.plan();
                    // `events` has made sure of the room.
                    let _ = batch.jobs.push(Job {
                        placement,
                        packet,
                        plan,
                        done: Placed::Ok,
                    });
                }
            }
            Event::StreamError { fault, .. } => qp.stream_error(fault, &mut batch.notify),
            Event::Established { .. } => qp.established(&mut batch.notify),
            Event::Drained { .. } => qp.drained(&mut batch.notify),
            _ => {}
        }
    }

    /// Takes packets out of the core and finds their payload. Returns whether there are any.
    fn fill(&self, state: &mut State, batch: &mut Batch, now: Time) -> bool {
        let State { core, qps, .. } = state;
        batch.used = 0;
        let mut regions = Recent::new(&self.device.regions);
        while let Some(slot) = batch.slots.get_mut(batch.used) {
            if !core.poll_transmit(now, &mut slot.tx) {
                break;
            }
            let found = match slot.tx.payload {
                Payload::None | Payload::Pad { .. } => Ok(()),
                Payload::Send {
                    stream,
                    wr,
                    offset,
                    len,
                } => qp_of(qps, stream)
                    .ok_or(Refused)
                    .and_then(|qp| qp.send_source(wr, offset, len, &mut regions, &mut slot.frags)),
                Payload::Read {
                    stream,
                    request,
                    offset,
                    len,
                } => qp_of(qps, stream).ok_or(Refused).and_then(|qp| {
                    qp.read_slice(request, offset, len, &mut regions, &mut slot.frags)
                }),
            };
            match found {
                Ok(()) => {
                    // The core's plane is this one now, and may soon be another.
                    if slot.tx.plane != 0 {
                        slot.leg = core.plane(slot.tx.plane).map_or(Leg::NONE, |p| Leg {
                            local: p.local,
                            remote: p.remote_gid,
                        });
                    }
                    batch.used += 1;
                }
                // The memory is gone (deregistered under a running WR): the stream fails,
                // and its packets become void.
                Err(Refused) => {
                    slot.frags.clear();
                    core.source_lost(now, &slot.tx);
                }
            }
        }
        batch.used > 0
    }

    /// Sends the batch.
    fn send(&self, batch: &mut Batch) {
        // One bit per slot; BATCH is at most 64.
        let mut unsent = 0u64;
        let packets = batch.slots.iter_mut().take(batch.used).map(|slot| {
            slot.bytes = u64::from(slot.tx.header_len) + slot.frags.len() as u64;
            (&slot.tx, &slot.leg, Some(&mut slot.frags))
        });
        self.flow.xmit_all(packets, |places, why| {
            // What cannot go at all counts as lost, and is tried again ever more seldom.
            if matches!(why, XmitError::Refused | XmitError::NoMemory) {
                for place in places {
                    unsent |= 1 << (place & 63);
                }
            }
        });
        for (i, slot) in batch.slots.iter_mut().take(batch.used).enumerate() {
            slot.unsent = unsent & 1 << (i & 63) != 0;
            if !slot.unsent {
                self.device.counters.add_path(slot.tx.path, slot.bytes);
            }
            slot.frags.clear();
        }
    }
}

/// Remembers what has become of a path, and tells those who listen.
fn path_changed(
    core: &Connection,
    qps: &[Option<Arc<QpInner>>],
    history: &mut History,
    batch: &mut Batch,
    now: Time,
    path: u8,
) {
    let Some(path) = core.paths().nth(usize::from(path)) else {
        return;
    };
    let plane = core.plane(path.plane).map_or(0, |p| p.local);
    if history.record(now, &path, plane) {
        for stream in history.listeners() {
            if let Some(qp) = qp_of(qps, *stream) {
                qp.path_changed(&mut batch.notify);
            }
        }
    }
}

/// The stream that an event is about.
fn stream_of(event: &Event) -> Option<StreamId> {
    match *event {
        Event::SendDone { stream, .. }
        | Event::RecvDone { stream, .. }
        | Event::Invalidate { stream, .. }
        | Event::Read { stream, .. }
        | Event::ReadReleased { stream, .. }
        | Event::Atomic { stream, .. }
        | Event::Local { stream, .. }
        | Event::StreamError { stream, .. }
        | Event::Established { stream }
        | Event::Drained { stream } => Some(stream),
        Event::Release(p) => Some(p.token.stream),
        Event::Discard(token) => Some(token.stream),
        Event::ConnectionUp
        | Event::ConnectionFailed(_)
        | Event::ConnectionClosed
        | Event::PathChanged { .. } => None,
    }
}

impl BhWork for Conn {
    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    /// The end of a receive batch: reads, acknowledges, completes, goes on sending.
    fn run(this: Arc<Self>) {
        for _ in 0..WORK_ROUNDS {
            this.read();
            {
                let mut state = this.state.lock();
                let now = net::now();
                state.core.end_of_batch(now);
                if state.core.report_is_due(now) {
                    this.device.report(now, &mut state.core);
                }
            }
            Conn::run(&this);
            // What has come meanwhile is read at once: nobody has to be woken for it.
            if this.has_read() {
                return;
            }
        }
        bh::queue(&this);
    }
}

impl timer::Handler for Conn {
    fn timer(&self) -> &Timer<Self> {
        &self.timer
    }

    fn expired(this: Arc<Self>) {
        {
            let mut state = this.state.lock();
            state.armed = Time::MAX;
            if state.stopped {
                return;
            }
            state.core.handle_timeout(net::now());
        }
        this.run();
    }
}

/// Sees to the memory of connections, in process context.
#[pin_data]
pub struct Keeper {
    /// The first of those that wait, each of which has the next one.
    #[pin]
    first: SpinLock<Option<Arc<Conn>>>,
    #[pin]
    work: bh::Item<Self>,
}

impl Keeper {
    /// Nobody waits. `ENOMEM`.
    pub fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                first <- new_spinlock!(None, "metaroce_keeper"),
                work <- bh::Item::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Adds a connection that is not in the list. Softirqs are off; the caller holds the
    /// connection's lock.
    fn add(self: &Arc<Self>, conn: &Arc<Conn>) {
        {
            let mut first = self.first.lock();
            *conn.next.lock() = first.take();
            *first = Some(conn.clone());
        }
        bh::queue(self);
    }

    fn pop(&self) -> Option<Arc<Conn>> {
        let _bh = bh::disable();
        let mut first = self.first.lock();
        let conn = first.take()?;
        *first = conn.next.lock().take();
        drop(first);
        Some(conn)
    }

    /// Ends its work. Process context; nobody adds a connection any more.
    fn stop(self: &Arc<Self>) {
        bh::cancel_sync(self);
        while self.pop().is_some() {}
    }
}

impl BhWork for Keeper {
    const SLEEPS: bool = true;

    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    fn run(this: Arc<Self>) {
        while let Some(conn) = this.pop() {
            conn.exchange_memory();
        }
    }
}

impl Conn {
    /// Gets the memory that it has use for now. Process context.
    fn exchange_memory(self: &Arc<Self>) {
        let (paths, records, held) = {
            let _bh = bh::disable();
            let mut state = self.state.lock();
            // From here on it may ask again.
            state.kept = false;
            let State { core, held, .. } = &mut *state;
            (core.path_count(), core.wants_records(), held.wanted(core))
        };
        let records = records.map(|n| Connection::record_memory(paths, n));
        let held = held.map(os::Vec::with_capacity);
        let failed = matches!(records, Some(Err(_))) || matches!(held, Some(Err(_)));
        if failed {
            self.device.counters.no_memory();
        }
        let (mut records, mut held) = (records.and_then(Result::ok), held.and_then(Result::ok));
        {
            let _bh = bh::disable();
            {
                let mut state = self.state.lock();
                records = records.map(|memory| state.core.use_records(memory));
                if let Some(memory) = &mut held {
                    state.held.exchange(memory);
                }
                if failed {
                    state.memory_again = net::now().saturating_add(MEMORY_AGAIN);
                } else {
                    state.core.memory_is_least();
                }
            }
            // There may be room for packets now.
            self.run();
        }
        // Freed outside the lock.
        drop((records, held));
    }
}

/// A QP's place in a connection.
#[derive(Clone)]
pub struct Attachment {
    conn: Arc<Conn>,
    stream: StreamId,
}

/// Attaches `stream` to the connection that `key` and `flow` name, which is made if there
/// is none. Process context; the caller holds the QP's state mutex. On an error the stream
/// is handed back.
pub fn connect(
    qp: &Arc<QpInner>,
    key: Key,
    flow: Flow,
    choice: Choice,
    mut stream: os::Box<stream::Stream>,
) -> core::result::Result<Attachment, (Error, os::Box<stream::Stream>)> {
    let device = &qp.device;
    let _serial = device.table.connecting.lock();
    let mut flow = Some(flow);
    // A connection that is just closing refuses: a new one takes its place.
    for _ in 0..2 {
        let found = {
            let _bh = bh::disable();
            device.table.by_key(&key)
        };
        let conn = match (found, flow.take()) {
            (Some(conn), rest) => {
                flow = rest;
                conn
            }
            (None, Some(flow)) => match device.table.insert(device, key, flow, choice) {
                Ok(conn) => conn,
                Err(e) => return Err((e, stream)),
            },
            (None, None) => break,
        };
        match conn.attach(qp, stream) {
            Ok(attachment) => return Ok(attachment),
            Err((None, back)) => {
                device.table.remove(&conn);
                stream = back;
            }
            Err((Some(e), back)) => return Err((e, back)),
        }
    }
    Err((EAGAIN, stream))
}

impl Table {
    /// Makes a connection. The caller holds `connecting`.
    /// Out of line, so that its frame is gone when the first packets are sent.
    #[inline(never)]
    fn insert(
        &self,
        device: &Arc<DeviceInner>,
        key: Key,
        flow: Flow,
        choice: Choice,
    ) -> Result<Arc<Conn>> {
        // Only `connecting`'s holder takes places: room that was made is still there.
        let (free, places) = {
            let _bh = bh::disable();
            let mut slots = self.slots.lock();
            if slots.closed {
                return Err(ENODEV);
            }
            (slots.conns.reserve(), slots.conns.places())
        };
        let place = match free {
            Some(place) => place,
            None => {
                if places as u64 > INDEX_MASK {
                    return Err(ENOSPC);
                }
                let room = Room::beyond(places)?;
                let (_old, place) = {
                    let _bh = bh::disable();
                    let mut slots = self.slots.lock();
                    (slots.conns.grow(room), slots.conns.reserve())
                };
                place.ok_or(ENOSPC)?
            }
        };
        let cid = (net::random_u64() & !INDEX_MASK) | u64::from(place);
        let conn = match Conn::new(device, cid, key, flow, choice) {
            Ok(conn) => conn,
            Err(e) => {
                let _bh = bh::disable();
                self.slots.lock().conns.give_back(place);
                return Err(e);
            }
        };
        {
            let _bh = bh::disable();
            let mut slots = self.slots.lock();
            if slots.closed {
                return Err(ENODEV);
            }
            // The place is reserved for it.
            slots.conns.insert(conn.clone()).map_err(|_| ENOSPC)?;
        }
        conn.update_planes();
        Ok(conn)
    }
}

impl Conn {
    /// Attaches a QP. `Err((None, _))`: the connection is closing.
    fn attach(
        self: &Arc<Self>,
        qp: &Arc<QpInner>,
        stream: os::Box<stream::Stream>,
    ) -> core::result::Result<Attachment, (Option<Error>, os::Box<stream::Stream>)> {
        // Memory for more streams, when one more needs it, made outside the lock; what it replaces
        // is freed outside as well. `connecting` keeps their number from growing in between.
        let wanted = {
            let _bh = bh::disable();
            let wanted = self.state.lock().core.wanted_slots();
            wanted
        };
        let memory = Connection::spare(wanted).and_then(|spare| {
            let table = os::Vec::from_fn(spare.slots(), |_| None)?;
            Ok((spare, table))
        });
        let Ok((spare, mut table)) = memory else {
            return Err((Some(ENOMEM), stream));
        };
        let _bh = bh::disable();
        let result = {
            let mut state = self.state.lock();
            let now = net::now();
            let State { core, qps, .. } = &mut *state;
            match core.attach(now, stream, spare) {
                Ok((id, old)) => {
                    let at = id.0 as usize;
                    if at >= qps.len() {
                        for (new, old) in table.iter_mut().zip(qps.iter_mut()) {
                            *new = old.take();
                        }
                        core::mem::swap(&mut table, qps);
                    }
                    if let Some(slot) = qps.get_mut(at) {
                        *slot = Some(qp.clone());
                    }
                    drop(state);
                    drop(old);
                    Ok(Attachment {
                        conn: self.clone(),
                        stream: id,
                    })
                }
                Err((stream, spare)) => {
                    drop(state);
                    drop(spare);
                    Err((None, stream))
                }
            }
        };
        self.run();
        result
    }
}

/// What is shown of a connection.
#[derive(Clone, Copy, Default)]
pub struct Summary {
    /// Id that the peer writes into its packets.
    pub cid: u64,
    /// The peer's GID.
    pub peer: [u8; 16],
    /// Paths; 0 while it is not up.
    pub paths: u64,
    /// Planes that have paths.
    pub planes: u64,
    /// Paths that take packets. The following three are theirs.
    pub paths_good: u64,
    /// Mean of the smoothed round-trip times, ns; 0 is unknown.
    pub srtt: u64,
    /// Windows, bytes.
    pub window: u64,
    /// In flight, bytes.
    pub inflight: u64,
    /// Transmissions of packets that had been sent before.
    pub retransmits: u64,
    /// Send records of a path, which bound its packets in flight.
    pub records: u64,
}

impl Attachment {
    /// Looks at the connection as it is now. Process context; `f` runs under its lock.
    pub fn inspect(&self, f: &mut dyn FnMut(&Conn, &Connection, &History)) {
        let _bh = bh::disable();
        let state = self.conn.state.lock();
        f(&self.conn, &state.core, &state.history);
    }

    /// The QP is told what becomes of paths. `ENOSPC`: too many are.
    pub fn listen(&self) -> Result {
        let _bh = bh::disable();
        let mut state = self.conn.state.lock();
        state.history.listen(self.stream)
    }

    /// It is not any more.
    pub fn unlisten(&self) {
        let _bh = bh::disable();
        let mut state = self.conn.state.lock();
        state.history.unlisten(self.stream);
    }

    /// What is shown of the connection. Process context.
    pub fn summary(&self) -> Summary {
        let mut sum = Summary {
            cid: self.conn.cid,
            peer: self.conn.key.remote,
            ..Summary::default()
        };
        let mut measured = 0;
        let _bh = bh::disable();
        let state = self.conn.state.lock();
        sum.retransmits = state.core.counters().retransmits;
        sum.records = state.core.records() as u64;
        sum.planes = state.core.planes().filter(|p| p.paths != 0).count() as u64;
        for path in state.core.paths() {
            sum.paths += 1;
            if path.health == connection::Health::Good {
                sum.paths_good += 1;
                sum.window += u64::from(path.window);
                sum.inflight += u64::from(path.inflight);
                if path.srtt != 0 {
                    sum.srtt = sum.srtt.saturating_add(path.srtt);
                    measured += 1;
                }
            }
        }
        sum.srtt = sum.srtt.checked_div(measured).unwrap_or(0);
        sum
    }

    /// Takes new WQEs out of the send ring and starts them. Any context.
    pub fn doorbell(&self, qp: &QpInner) {
        let _bh = bh::disable();
        loop {
            let taken = {
                let mut state = self.conn.state.lock();
                let now = net::now();
                let core = &mut state.core;
                qp.fetch_sends(FETCH, &mut |wr: SendWr| {
                    core.post_send(now, self.stream, wr).is_ok()
                })
            };
            if taken < FETCH {
                break;
            }
        }
        self.conn.run();
    }

    /// Tells the core the QP's new state.
    pub fn set_state(&self, to: stream::State) {
        let _bh = bh::disable();
        self.conn
            .state
            .lock()
            .core
            .set_state(net::now(), self.stream, to);
        self.conn.run();
    }

    /// Changes the stream's attributes (modify_qp after RTR).
    pub fn set_attr(&self, attr: &stream::StreamAttr) {
        let _bh = bh::disable();
        if let Some(stream) = self.conn.state.lock().core.stream(self.stream) {
            // The payload of a packet is the connection's business.
            let payload_mtu = stream.attr().payload_mtu;
            stream.set_attr(&stream::StreamAttr {
                payload_mtu,
                ..*attr
            });
        }
        self.conn.run();
    }

    /// Takes the stream to ERR, when it still is `qp`'s. Any context, no lock held.
    pub fn fail(&self, qp: &QpInner) {
        let _bh = bh::disable();
        {
            let mut state = self.conn.state.lock();
            let State { core, qps, .. } = &mut *state;
            let ours = qp_of(qps, self.stream).is_some_and(|q| ::core::ptr::eq(&**q, qp));
            if !ours {
                return;
            }
            core.set_state(net::now(), self.stream, stream::State::Err);
        }
        self.conn.run();
    }

    /// Receives were posted where there had been none.
    pub fn receives_posted(&self, qp: &QpInner) {
        let _bh = bh::disable();
        let posted = qp.receives_posted();
        self.conn
            .state
            .lock()
            .core
            .receives_changed(net::now(), self.stream, posted);
        self.conn.run();
    }

    /// Takes the QP out of the connection, and waits until no copy for it is running.
    /// Process context.
    pub fn disconnect(self, qp: &QpInner) -> Option<os::Box<stream::Stream>> {
        // Without room for them they are freed under the lock, which is slow, not wrong.
        let held = {
            let _bh = bh::disable();
            let held = self.conn.state.lock().held.packets.len();
            held
        };
        let mut trash = os::Vec::with_capacity(held).unwrap_or_default();
        let (stream, gone) = {
            let _bh = bh::disable();
            let mut state = self.conn.state.lock();
            let State {
                core,
                qps,
                held,
                history,
                ..
            } = &mut *state;
            let stream = core.detach(net::now(), self.stream);
            history.unlisten(self.stream);
            let mut i = 0;
            while let Some(token) = held.packets.get(i).map(|p| p.token) {
                if token.stream != self.stream {
                    i += 1;
                } else if let Some(packet) = held.take(&token) {
                    let _ = trash.push(packet);
                }
            }
            let gone = qps
                .get_mut(self.stream.0 as usize)
                .and_then(|slot| slot.take());
            drop(state);
            self.conn.run();
            (stream, gone)
        };
        drop((trash, gone));
        qp.wait_for_copies();
        stream
    }
}
