// SPDX-License-Identifier: GPL-2.0

//! Sending the packets of one connection, on its own plane and on others.

#![forbid(unsafe_code)]

use super::{port::Link, Port, Skb, XmitError};
use crate::{
    kernel_ext::{
        bh,
        dst::{Dst, DstRef, FlowKey},
        net::{device_of_address, ipv4_of},
        skb::{Headers, TxSkb, IPV4_LEN, IPV6_LEN, MAX_PAGES, UDP_LEN},
        udp::Sock,
    },
    mem::Frags,
    os,
    proto::{
        api::{Payload, Transmit},
        wire::{self, PlaneAddress, PLANES_MAX},
    },
};
use ::core::{
    ops::Range,
    sync::atomic::{AtomicU8, Ordering},
};
use ::kernel::{
    new_spinlock,
    prelude::*,
    sync::{rcu, Arc, SpinLock},
};

/// Payload up to this many bytes is copied behind the header: cheaper than a page reference.
const COPY: usize = 256;

/// ECN field of all packets: ECT(0).
const ECT0: u8 = 2;

/// Hop limit of answers that belong to no connection.
const HOP_LIMIT: u8 = 64;

const CRC: u8 = 1;
const UDP_CHECKSUM: u8 = 2;
/// The peer is on this machine: bytes come out of memory and go into it, and a checksum that
/// is left to a network card need never be computed.
const WITHIN: u8 = 4;

/// What a [`Flow`] is made from.
pub struct FlowInit {
    /// The device's port.
    pub port: Arc<Port>,
    /// Interface index of the local GID's netdev (the device's own, or a VLAN, bond … on
    /// it); 0 for the device's own.
    pub interface: u32,
    /// Local GID.
    pub local: [u8; 16],
    /// Remote GID, of the same family.
    pub remote: [u8; 16],
    /// Traffic class of the address vector; its ECN bits are ours.
    pub traffic_class: u8,
    /// Hop limit of the address vector; 0 takes 64.
    pub hop_limit: u8,
    /// Number of paths, 1 to 256.
    pub paths: usize,
}

/// The way of packets whose [`Transmit::plane`] is not 0: from a plane of the device to an
/// address of the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Leg {
    /// Plane of the device; 0 is that of the flow's own local GID.
    pub local: u8,
    /// The peer's GID, of the same family as the flow's own.
    pub remote: [u8; 16],
}

impl Leg {
    /// Leads nowhere.
    pub const NONE: Self = Self {
        local: u8::MAX,
        remote: [0; 16],
    };
}

/// From where to where packets go.
#[derive(Clone, Copy)]
struct Ends<'a> {
    local: &'a [u8; 16],
    remote: &'a [u8; 16],
    /// Index of the interface that has the local GID.
    interface: u32,
    /// See [`Link::has_line`].
    has_line: bool,
    /// Tells flow hashes of different pairs of addresses apart.
    pair: u64,
}

/// Where the packets of a connection go.
pub struct Flow {
    port: Arc<Port>,
    interface: u32,
    local: [u8; 16],
    remote: [u8; 16],
    class: u8,
    hop_limit: u8,
    /// See [`Ends::pair`].
    pair: u64,
    /// What packets carry beside those of the handshake, which carry both: `CRC`,
    /// `UDP_CHECKSUM`; and `WITHIN`.
    integrity: AtomicU8,
    /// The route of each path, none once they are forgotten; `None` for flows that send one packet.
    routes: Option<Pin<KBox<SpinLock<os::Vec<Slot>>>>>,
}

/// The route of a path, as long as its source port and its plane stay the same.
struct Slot {
    source_port: u16,
    plane: u8,
    /// Interface and destination on a plane that is not 0: both can be others one day.
    interface: u32,
    remote: [u8; 16],
    dst: Option<Dst>,
}

impl Flow {
    /// A flow that sends with the CRC and without UDP checksum on IPv4, with both on IPv6
    /// (see [`Flow::set_integrity`]). EINVAL when the GIDs are of two families.
    pub fn new(init: FlowInit) -> Result<Self> {
        if ipv4_of(&init.local).is_some() != ipv4_of(&init.remote).is_some() {
            return Err(EINVAL);
        }
        let slots = os::Vec::from_fn(init.paths, |_| Slot {
            source_port: 0,
            plane: 0,
            interface: 0,
            remote: [0; 16],
            dst: None,
        })?;
        let routes = KBox::pin_init(new_spinlock!(slots, "metaroce_routes"), GFP_KERNEL)?;
        let mut flow = Self::bare(init.port, init.interface, init.local, init.remote);
        flow.class = init.traffic_class & !3 | ECT0;
        if init.hop_limit != 0 {
            flow.hop_limit = init.hop_limit;
        }
        flow.routes = Some(routes);
        Ok(flow)
    }

    /// A flow for one answer to `skb`, which came to `port`. Allocates nothing.
    pub fn answering(port: &Arc<Port>, skb: &Skb) -> Self {
        let mut flow = Self::bare(
            port.clone(),
            skb.interface(),
            skb.destination(),
            skb.source(),
        );
        flow.class = skb.traffic_class() & !3 | ECT0;
        flow
    }

    fn bare(port: Arc<Port>, interface: u32, local: [u8; 16], remote: [u8; 16]) -> Self {
        let integrity = if ipv4_of(&local).is_some() {
            CRC
        } else {
            CRC | UDP_CHECKSUM
        };
        Self {
            port,
            interface,
            local,
            remote,
            class: ECT0,
            hop_limit: HOP_LIMIT,
            pair: pair_of(&local, &remote),
            integrity: AtomicU8::new(integrity),
            routes: None,
        }
    }

    /// Sets what the two ends have agreed on for packets outside of the handshake, and
    /// whether the other end is on this machine.
    pub fn set_integrity(&self, crc: bool, udp_checksum: bool, within: bool) {
        let bits = if crc { CRC } else { 0 }
            | if udp_checksum { UDP_CHECKSUM } else { 0 }
            | if within { WITHIN } else { 0 };
        self.integrity.store(bits, Ordering::Relaxed);
    }

    /// Whether packets outside of the handshake carry a CRC.
    pub fn has_crc(&self) -> bool {
        self.integrity.load(Ordering::Relaxed) & CRC != 0
    }

    fn is_within(&self) -> bool {
        self.integrity.load(Ordering::Relaxed) & WITHIN != 0
    }

    /// Whether it goes over IPv6.
    pub fn is_ipv6(&self) -> bool {
        ipv4_of(&self.local).is_none()
    }

    /// The local GID.
    pub fn local(&self) -> &[u8; 16] {
        &self.local
    }

    /// The remote GID.
    pub fn remote(&self) -> &[u8; 16] {
        &self.remote
    }

    /// Gives up its routes, and keeps none from now on. Any context but hard interrupts.
    pub fn forget_routes(&self) {
        let Some(routes) = &self.routes else { return };
        let old = {
            let _bh = bh::disable();
            let mut slots = routes.lock();
            ::core::mem::take(&mut *slots)
        };
        drop(old);
    }

    /// Largest IP packet that the interface of this flow's route takes, in bytes, the
    /// netdev's own without a route; 0 when the port is closed.
    pub fn mtu(&self) -> u32 {
        let guard = rcu::read_lock();
        self.port
            .link(&guard)
            .map(|link| {
                let own = link.netdev.mtu();
                match self.lookup(link, &self.home(link), 0, 0) {
                    Ok(dst) => dst.borrow(&guard).interface_mtu().min(own),
                    Err(_) => own,
                }
            })
            .unwrap_or(0)
    }

    /// The planes of the device that its connection may use, in `list`, with their addresses:
    /// how many, and whether the administrator has set any. `None`: the port is closed, or the
    /// local GID is that of another netdev above the device's own (a VLAN), which has no planes.
    pub fn planes(&self, list: &mut [PlaneAddress; PLANES_MAX]) -> Option<(usize, bool)> {
        let guard = rcu::read_lock();
        let link = self.port.link(&guard)?;
        if self.interface != 0 && self.interface != link.netdev.index() {
            return None;
        }
        let mut count = 0;
        let mut places = list.iter_mut();
        let mut add = |id: u8, draining: bool, gid: &[u8; 16]| {
            if let Some(place) = places.next() {
                *place = PlaneAddress {
                    id,
                    draining,
                    gid: *gid,
                };
                count += 1;
            }
        };
        let planes = link.planes.get(&guard);
        match planes {
            None => add(0, false, &self.local),
            Some(planes) => {
                // The device's other addresses of plane 0 are those of other connections.
                let owner = device_of_address(link.net(), &self.local, &guard);
                let here = owner.is_some_and(|d| d.is(&link.netdev));
                let own = here.then_some(&self.local);
                for (id, plane) in planes.iter().filter(|(_, p)| p.is_up()) {
                    let gid = if id == 0 {
                        own
                    } else {
                        plane.address(self.is_ipv6())
                    };
                    if let Some(gid) = gid {
                        add(id, plane.draining, gid);
                    }
                }
            }
        }
        Some((count, planes.is_some()))
    }

    /// The ends of the flow's own addresses.
    fn home(&self, link: &Link) -> Ends<'_> {
        Ends {
            local: &self.local,
            remote: &self.remote,
            interface: match self.interface {
                0 => link.netdev.index(),
                i => i,
            },
            has_line: link.has_line,
            pair: self.pair,
        }
    }

    /// The ends of a packet. `Unreachable`: the device has no such plane any more, or that has
    /// no address.
    fn ends<'a>(
        &'a self,
        link: &'a Link,
        guard: &'a rcu::Guard,
        tx: &Transmit,
        leg: &'a Leg,
    ) -> Result<Ends<'a>, XmitError> {
        let home = self.home(link);
        if tx.plane == 0 {
            return Ok(home);
        }
        let mut ends = Ends {
            remote: &leg.remote,
            ..home
        };
        if leg.local != 0 {
            let planes = link.planes.get(guard);
            let plane = planes.and_then(|planes| planes.get(leg.local));
            let plane = plane.ok_or(XmitError::Unreachable)?;
            let gid = plane.address(self.is_ipv6());
            ends.local = gid.ok_or(XmitError::Unreachable)?;
            ends.interface = plane.interface;
            ends.has_line = plane.has_line;
        }
        ends.pair = pair_of(ends.local, ends.remote);
        Ok(ends)
    }

    /// Sends a packet on the flow's own addresses whose payload, if any, is padding. Every context
    /// but hard interrupts; calls for one path one after the other. (Room for pages would not fit
    /// on the stack of a softirq that came in the middle of something else.)
    pub fn xmit(&self, tx: &Transmit) -> Result<(), XmitError> {
        let mut result = Ok(());
        let one = ::core::iter::once((tx, &Leg::NONE, None));
        self.xmit_all(one, |_, e| result = Err(e));
        result
    }

    /// Sends packets as [`Flow::xmit`] does, each on its plane, in order within each path; their
    /// payload, unless it is padding, is the last of each triple. Pages are taken out of that where
    /// they are sent by reference. Packets of one path that follow each other go as one train.
    /// `failed` is called with the places in `packets` of what could not be sent, and the reason.
    pub fn xmit_all<'a>(
        &self,
        packets: impl Iterator<Item = (&'a Transmit, &'a Leg, Option<&'a mut Frags>)>,
        mut failed: impl FnMut(Range<usize>, XmitError),
    ) {
        let guard = rcu::read_lock();
        let Some((link, sock)) = self
            .port
            .link(&guard)
            .and_then(|l| Some((l, l.sock(self.is_ipv6())?)))
        else {
            return failed(0..packets.count(), XmitError::Refused);
        };
        let mut burst = Burst {
            flow: self,
            link,
            sock,
            guard: &guard,
            train: None,
            failed,
        };
        let mut count = 0;
        for (tx, leg, frags) in packets {
            burst.push(count, tx, leg, frags);
            count += 1;
        }
        burst.flush(count);
    }

    /// Makes a packet, without IP and UDP headers.
    fn packet(
        &self,
        dst: DstRef<'_>,
        tx: &Transmit,
        frags: Option<&mut Frags>,
    ) -> Result<TxSkb, XmitError> {
        let header = tx
            .header
            .get(..usize::from(tx.header_len))
            .ok_or(XmitError::TooBig)?;
        let payload = match tx.payload {
            Payload::Pad { len } => len as usize,
            _ => frags.as_ref().map_or(0, |f| f.len()),
        };
        let ip_len = if self.is_ipv6() { IPV6_LEN } else { IPV4_LEN };
        let total = (header.len() + payload).saturating_add((ip_len + UDP_LEN) as usize);
        if total > MAX_DATAGRAM || (!tx.may_fragment && total > dst.interface_mtu() as usize) {
            return Err(XmitError::TooBig);
        }
        let mut skb = build(dst, header, tx, frags, payload).ok_or(XmitError::NoMemory)?;
        let with_crc = tx.always_checksum || self.has_crc();
        if with_crc && !skb.seal(wire::CRC_OFFSET) {
            return Err(XmitError::TooBig);
        }
        Ok(skb)
    }

    /// What its IP and UDP headers say.
    fn headers(&self, link: &Link, ends: &Ends<'_>, tx: &Transmit) -> Headers {
        let udp_checksum = self.integrity.load(Ordering::Relaxed) & UDP_CHECKSUM != 0;
        Headers {
            source: *ends.local,
            destination: *ends.remote,
            class: self.class,
            hop_limit: self.hop_limit,
            flow_label: tx.flow_label,
            source_port: tx.source_port,
            destination_port: link.service,
            checksum: tx.always_checksum || tx.may_fragment || udp_checksum,
            may_fragment: tx.may_fragment,
            hash: ends.hash(tx.source_port),
        }
    }

    /// The path's route: the one it had, while its source port and plane are the same and the
    /// route still holds, otherwise a new one.
    fn route<'a>(
        &self,
        link: &Link,
        guard: &'a rcu::Guard,
        ends: &Ends<'_>,
        tx: &Transmit,
    ) -> Result<DstRef<'a>, XmitError> {
        let fresh = || {
            self.lookup(link, ends, tx.source_port, tx.flow_label)
                .map_err(|_| XmitError::Unreachable)
        };
        let Some(routes) = &self.routes else {
            return Ok(fresh()?.borrow(guard));
        };
        let _bh = bh::disable();
        let mut slots = routes.lock();
        let Some(slot) = slots.get_mut(usize::from(tx.path)) else {
            drop(slots);
            return Ok(fresh()?.borrow(guard));
        };
        let same = slot.plane == tx.plane
            && (tx.plane == 0 || slot.interface == ends.interface && slot.remote == *ends.remote);
        if same && slot.source_port == tx.source_port {
            if let Some(dst) = slot.dst.as_ref().filter(|d| d.is_valid()) {
                return Ok(dst.borrow(guard));
            }
        }
        slot.dst = None;
        let dst = fresh()?;
        let found = dst.borrow(guard);
        *slot = Slot {
            source_port: tx.source_port,
            plane: tx.plane,
            interface: ends.interface,
            remote: *ends.remote,
            dst: Some(dst),
        };
        Ok(found)
    }

    /// Looks a route up: first without a word about the interface, since otherwise the
    /// stack does not choose between next hops; when that leads out by another interface
    /// than the GID's, once more by that one.
    fn lookup(
        &self,
        link: &Link,
        ends: &Ends<'_>,
        source_port: u16,
        flow_label: u32,
    ) -> Result<Dst> {
        let interface = ends.interface;
        let key = FlowKey {
            source: *ends.local,
            destination: *ends.remote,
            class: self.class & !3,
            flow_label,
            source_port,
            destination_port: link.service,
            interface: 0,
        };
        let guard = rcu::read_lock();
        if !is_link_local(ends.remote) {
            if let Ok(dst) = Dst::lookup(link.net(), &key) {
                let found = dst.borrow(&guard);
                if found.interface() == interface || found.is_local() {
                    return Ok(dst);
                }
            }
        }
        Dst::lookup(link.net(), &FlowKey { interface, ..key })
    }
}

impl Ends<'_> {
    /// The same for all packets of a path, so that queues keep them in order, and for the
    /// same path in every run: routers in namespaces of this machine choose by it.
    fn hash(&self, source_port: u16) -> u32 {
        (mix(self.pair ^ u64::from(source_port)) >> 32) as u32
    }
}

/// Packets on their way to the stack.
struct Burst<'a, F> {
    flow: &'a Flow,
    link: &'a Link,
    sock: Sock<'a>,
    guard: &'a rcu::Guard,
    train: Option<Train<'a>>,
    failed: F,
}

/// The packets of one path that go next.
struct Train<'a> {
    skb: TxSkb,
    dst: DstRef<'a>,
    ends: Ends<'a>,
    headers: Headers,
    path: u8,
    plane: u8,
    leg: &'a Leg,
    /// Place of its first packet.
    begin: usize,
}

impl Train<'_> {
    /// Whether the packet takes the same way.
    fn goes_on(&self, tx: &Transmit, leg: &Leg) -> bool {
        self.path == tx.path
            && self.headers.source_port == tx.source_port
            && self.plane == tx.plane
            && (tx.plane == 0 || self.leg == leg)
    }
}

impl<'a, F: FnMut(Range<usize>, XmitError)> Burst<'a, F> {
    /// Makes the packet at place `at`, and couples it to the train or sends that and begins
    /// another one.
    fn push(&mut self, at: usize, tx: &Transmit, leg: &'a Leg, frags: Option<&mut Frags>) {
        let flow = self.flow;
        let same = self.train.as_ref().filter(|t| t.goes_on(tx, leg));
        let made = match same {
            Some(train) => Ok((train.ends, train.dst)),
            None => flow
                .ends(self.link, self.guard, tx, leg)
                .and_then(|ends| Ok((ends, flow.route(self.link, self.guard, &ends, tx)?))),
        }
        .and_then(|(ends, dst)| Ok((ends, dst, flow.packet(dst, tx, frags)?)));
        let (ends, dst, mut skb) = match made {
            Ok(made) => made,
            Err(e) => {
                self.flush(at);
                return (self.failed)(at..at + 1, e);
            }
        };
        let headers = flow.headers(self.link, &ends, tx);
        skb.add_headers(self.sock, &headers);
        if let Some(train) = self.train.as_mut().filter(|t| {
            t.goes_on(tx, leg)
                && t.headers.flow_label == headers.flow_label
                && t.headers.checksum == headers.checksum
                && !t.headers.may_fragment
                && !headers.may_fragment
        }) {
            // A network card on the way (between two ports of this machine) could be one that
            // computes none.
            let later = !ends.has_line && flow.is_within();
            match train.skb.couple(skb, later) {
                Ok(()) => return,
                Err(back) => skb = back,
            }
        }
        self.flush(at);
        self.train = Some(Train {
            skb,
            dst,
            ends,
            headers,
            path: tx.path,
            plane: tx.plane,
            leg,
            begin: at,
        });
    }

    /// Sends the train, whose last packet is the one ahead of place `end`.
    fn flush(&mut self, end: usize) {
        let Some(train) = self.train.take() else {
            return;
        };
        if let Err(e) = train.skb.send(self.sock, train.dst, &train.headers) {
            (self.failed)(train.begin..end, e);
        }
    }
}

/// Largest IP packet, in bytes.
const MAX_DATAGRAM: usize = 65_535;

/// Scatters the bits of `x`: a multiplicative hash, twice.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn pair_of(local: &[u8; 16], remote: &[u8; 16]) -> u64 {
    let fold = |gid: &[u8; 16]| {
        mix((u128::from_be_bytes(*gid) >> 64) as u64 ^ u128::from_be_bytes(*gid) as u64)
    };
    fold(local).wrapping_add(fold(remote).rotate_left(32))
}

fn is_link_local(gid: &[u8; 16]) -> bool {
    matches!(*gid, [0xfe, b, ..] if b & 0xc0 == 0x80)
}

/// Makes the packet: a copy of the header, and the payload as pages by reference, or as a
/// copy where it is small, in too many pieces, or may change until it is sent again.
fn build(
    dst: DstRef<'_>,
    header: &[u8],
    tx: &Transmit,
    frags: Option<&mut Frags>,
    payload: usize,
) -> Option<TxSkb> {
    let len = u32::try_from(payload).ok()?;
    // Padding is zeros.
    let frags = frags.filter(|_| !matches!(tx.payload, Payload::Pad { .. }));
    let copy = |frags: &Option<&mut Frags>, at, to: &mut [u8]| match frags {
        Some(frags) => frags.copy_to(at, to),
        None => {
            to.fill(0);
            true
        }
    };
    if payload <= COPY {
        let mut skb = TxSkb::new(dst, header, len, 0)?;
        let to = skb.put_space(payload)?;
        return copy(&frags, 0, to).then_some(skb);
    }
    let may_refer = !tx.resend && !matches!(tx.payload, Payload::Read { .. });
    match frags {
        Some(frags) if may_refer && (1..=MAX_PAGES).contains(&frags.pieces()) => {
            let mut skb = TxSkb::new(dst, header, 0, 0)?;
            for page in frags.drain() {
                if !skb.add_page(page) {
                    return None;
                }
            }
            Some(skb)
        }
        frags => {
            let mut skb = TxSkb::new(dst, header, 0, len)?;
            skb.fill(|at, piece| copy(&frags, at, piece)).then_some(skb)
        }
    }
}
