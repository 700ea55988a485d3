// SPDX-License-Identifier: GPL-2.0

//! Packets: one that arrived ([`Skb`]), and one to send ([`TxSkb`]).
//!
//! C header: `include/linux/skbuff.h`.

use super::{
    crc::Crc32c,
    dst::DstRef,
    net::{in6, ipv4_of, mapped, DevRef},
    udp::Sock,
};
use crate::{bindings, mem::PageRef};
use ::core::{
    marker::PhantomData,
    mem::{ManuallyDrop, MaybeUninit},
    ptr,
    ptr::NonNull,
    slice,
};
use ::kernel::sync::rcu;

/// Pieces of pages that one packet can refer to.
pub const MAX_PAGES: usize = bindings::MAX_SKB_FRAGS as usize;

const NET_XMIT_DROP: i32 = bindings::NET_XMIT_DROP as i32;
const NET_XMIT_CN: i32 = bindings::NET_XMIT_CN as i32;

/// Bytes of a UDP header.
pub const UDP_LEN: u32 = 8;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: u32 = 20;
/// Bytes of an IPv6 header.
pub const IPV6_LEN: u32 = 40;

/// A received packet, from the byte behind its UDP header on.
///
/// It may be kept: it refers to neither route nor device nor socket. Its pages may belong
/// to a program on this machine (a packet that never left it), so their bytes may change
/// while they are read.
pub struct Skb {
    skb: NonNull<bindings::sk_buff>,
}

// SAFETY: A packet may be read and freed on every CPU.
unsafe impl Send for Skb {}
// SAFETY: Nothing is changed through a shared reference.
unsafe impl Sync for Skb {}

impl Skb {
    /// Takes `skb` over.
    ///
    /// # Safety
    ///
    /// The caller owns `skb`, whose network and transport headers are set and linear, and
    /// whose data begin behind the UDP header. It has no route, socket or destructor left.
    pub(super) unsafe fn from_raw(skb: NonNull<bindings::sk_buff>) -> Self {
        Self { skb }
    }

    /// The C object, valid as long as `self`.
    pub fn as_ptr(&self) -> *mut bindings::sk_buff {
        self.skb.as_ptr()
    }

    fn raw(&self) -> &bindings::sk_buff {
        // SAFETY: `self` owns the packet.
        unsafe { self.skb.as_ref() }
    }

    /// Bytes behind the UDP header.
    pub fn len(&self) -> u32 {
        self.raw().len
    }

    /// Whether there is nothing behind the UDP header.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory that the packet occupies, in bytes.
    pub fn truesize(&self) -> u32 {
        self.raw().truesize
    }

    /// The bytes that lie in one piece at the beginning.
    pub fn linear(&self) -> &[u8] {
        let skb = self.raw();
        let len = skb.len.saturating_sub(skb.data_len) as usize;
        // SAFETY: `len - data_len` bytes from `data` on are linear, and private to the
        // packet or only read.
        unsafe { slice::from_raw_parts(skb.data, len) }
    }

    /// Makes at least `len` bytes linear; `false` when there are not so many, or no memory.
    pub fn pull(&mut self, len: u32) -> bool {
        // SAFETY: `self` owns the packet; no slice of it is borrowed (`&mut self`).
        unsafe { bindings::metaroce_pskb_may_pull(self.as_ptr(), len) }
    }

    /// Copies bytes from `at` on into `to`; `false` when the packet ends before.
    pub fn read(&self, at: u32, to: &mut [u8]) -> bool {
        let (Ok(at), Ok(len)) = (i32::try_from(at), i32::try_from(to.len())) else {
            return false;
        };
        // SAFETY: `to` is valid for `len` bytes; the function checks the range.
        unsafe { bindings::skb_copy_bits(self.as_ptr(), at, to.as_mut_ptr().cast(), len) == 0 }
    }

    /// Whether the CRC32C of the whole packet, with the 4 bytes at `hole` taken as 0, is
    /// `expected`. The hole lies in the linear part.
    pub fn check_crc(&self, hole: usize, expected: u32) -> bool {
        let (Some(head), Ok(rest)) = (self.linear().get(..hole), u32::try_from(hole)) else {
            return false;
        };
        let mut crc = Crc32c::begin();
        crc.update(head);
        crc.update(&[0; 4]);
        crc.update_skb(self.reader(), rest.saturating_add(4)) && crc.finish() == expected
    }

    fn reader(&self) -> SkbReader<'_> {
        SkbReader {
            skb: self.skb,
            _skb: PhantomData,
        }
    }

    fn network(&self) -> &[u8] {
        // SAFETY: The network header is set (type invariant).
        let at: *const u8 = unsafe { bindings::metaroce_skb_network_header(self.as_ptr()) }.cast();
        // SAFETY: An IPv4 header and a UDP header, or an IPv6 header, were linear when the
        // packet was taken over: at least 28 bytes.
        let ip = unsafe { slice::from_raw_parts(at, (IPV4_LEN + UDP_LEN) as usize) };
        match ip.first() {
            // SAFETY: A packet that says it is IPv6 passed the stack's check of its header.
            Some(b) if b >> 4 == 6 => unsafe { slice::from_raw_parts(at, IPV6_LEN as usize) },
            _ => ip,
        }
    }

    fn udp(&self) -> &[u8; 8] {
        // SAFETY: The transport header is set and linear (type invariant).
        unsafe { &*bindings::metaroce_skb_transport_header(self.as_ptr()).cast() }
    }

    /// Whether it came over IPv6.
    pub fn is_ipv6(&self) -> bool {
        self.network().first().is_some_and(|b| b >> 4 == 6)
    }

    /// Where it came from, as a GID.
    pub fn source(&self) -> [u8; 16] {
        self.address(12, 8)
    }

    /// The address it was sent to, as a GID.
    pub fn destination(&self) -> [u8; 16] {
        self.address(16, 24)
    }

    fn address(&self, v4: usize, v6: usize) -> [u8; 16] {
        let ip = self.network();
        if self.is_ipv6() {
            ip.get(v6..)
                .and_then(|b| b.first_chunk())
                .copied()
                .unwrap_or_default()
        } else {
            mapped(
                ip.get(v4..)
                    .and_then(|b| b.first_chunk())
                    .copied()
                    .unwrap_or_default(),
            )
        }
    }

    /// IPv4 type of service or IPv6 traffic class.
    pub fn traffic_class(&self) -> u8 {
        match *self.network() {
            [a, b, ..] if a >> 4 == 6 => a << 4 | b >> 4,
            [_, tos, ..] => tos,
            _ => 0,
        }
    }

    /// Whether a queue on the way marked it (ECN "congestion experienced").
    pub fn ce(&self) -> bool {
        self.traffic_class() & 3 == 3
    }

    /// UDP source port.
    pub fn source_port(&self) -> u16 {
        let [a, b, ..] = *self.udp();
        u16::from_be_bytes([a, b])
    }

    /// Whether it came with a UDP checksum, which the stack has then verified.
    pub fn has_udp_checksum(&self) -> bool {
        let [.., a, b] = *self.udp();
        // SAFETY: `self` owns the packet.
        a != 0 || b != 0 || unsafe { bindings::metaroce_skb_is_csum_partial(self.as_ptr()) }
    }

    /// Index of the interface it came in by; 0 when it never left this machine.
    pub fn interface(&self) -> u32 {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_skb_iif(self.as_ptr()) }
    }

    /// Plane of the device that it came in on, once that was said.
    pub fn plane(&self) -> u8 {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_skb_mark(self.as_ptr()) as u8 }
    }

    /// Says which plane it came in on.
    pub fn set_plane(&mut self, plane: u8) {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_skb_set_mark(self.as_ptr(), plane.into()) };
    }

    /// Whether a network card's own queue brought it. Otherwise a device of software did,
    /// on the CPU that sent it.
    pub fn has_queue(&self) -> bool {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_skb_has_napi(self.as_ptr()) }
    }

    /// The device it came in on, as IP sees it. Only in the handler that receives it.
    pub(super) fn take_device<'a>(&mut self, guard: &'a rcu::Guard) -> Option<DevRef<'a>> {
        // SAFETY: `self` owns the packet.
        let dev = unsafe { bindings::metaroce_skb_take_dev(self.as_ptr()) };
        // SAFETY: While a packet is received, its device is protected by RCU.
        let dev = unsafe { DevRef::new(dev, guard) };
        // SAFETY: `self` owns the packet.
        unsafe {
            bindings::metaroce_skb_set_iif(self.as_ptr(), dev.map_or(0, |d| d.unless_loopback()));
        }
        dev
    }
}

impl Drop for Skb {
    fn drop(&mut self) {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_consume_skb(self.as_ptr()) };
    }
}

/// Packets in a row. They are linked with each other: nothing is allocated.
pub struct SkbQueue {
    head: *mut bindings::sk_buff,
    tail: *mut bindings::sk_buff,
    len: usize,
}

// SAFETY: As for `Skb`.
unsafe impl Send for SkbQueue {}

impl SkbQueue {
    /// An empty row.
    pub const fn new() -> Self {
        Self {
            head: ptr::null_mut(),
            tail: ptr::null_mut(),
            len: 0,
        }
    }

    /// Packets in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts `skb` at the end.
    pub fn push(&mut self, skb: Skb) {
        let skb = ManuallyDrop::new(skb).as_ptr();
        // SAFETY: The packet passes to the row, as did `tail`; the link of a packet that is
        // in no list of the stack is free for its owner.
        unsafe {
            bindings::metaroce_skb_set_next(skb, ptr::null_mut());
            if self.tail.is_null() {
                self.head = skb;
            } else {
                bindings::metaroce_skb_set_next(self.tail, skb);
            }
        }
        self.tail = skb;
        self.len += 1;
    }

    /// Takes the first one out.
    pub fn pop(&mut self) -> Option<Skb> {
        let skb = NonNull::new(self.head)?;
        // SAFETY: The row owns the packet, which passes to the caller, linked to nothing.
        unsafe {
            self.head = bindings::metaroce_skb_next(skb.as_ptr());
            bindings::metaroce_skb_set_next(skb.as_ptr(), ptr::null_mut());
        }
        if self.head.is_null() {
            self.tail = ptr::null_mut();
        }
        self.len -= 1;
        Some(Skb { skb })
    }
}

impl Default for SkbQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for SkbQueue {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// A packet that is being read.
#[derive(Clone, Copy)]
pub struct SkbReader<'a> {
    skb: NonNull<bindings::sk_buff>,
    _skb: PhantomData<&'a Skb>,
}

impl SkbReader<'_> {
    /// The C object, valid as long as `self`.
    pub(super) fn as_ptr(self) -> *mut bindings::sk_buff {
        self.skb.as_ptr()
    }

    /// Bytes of the packet.
    pub(super) fn bytes(self) -> u32 {
        // SAFETY: The packet lives (lifetime of `self`).
        unsafe { self.skb.as_ref() }.len
    }

    /// Calls `f` with all bytes from `at` on, piece by piece.
    pub fn for_each_piece(self, at: u32, mut f: impl FnMut(&[u8])) {
        let mut state = MaybeUninit::<bindings::skb_seq_state>::uninit();
        let state = state.as_mut_ptr();
        let mut done = 0;
        // SAFETY: The packet lives, and `state` is set up before it is used. The reader maps
        // one piece at a time and unmaps it when it is asked for the next; it is asked until
        // there is none. Bytes of a piece may change while they are read, when the page is
        // a program's: the result is then of old and new ones.
        unsafe {
            bindings::skb_prepare_seq_read(self.as_ptr(), at, self.bytes(), state);
            loop {
                let mut piece = ptr::null();
                let n = bindings::skb_seq_read(done, &mut piece, state);
                if n == 0 {
                    break;
                }
                f(slice::from_raw_parts(piece, n as usize));
                done += n;
            }
        }
    }
}

/// What the IP stack said to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XmitError {
    /// A queue is full: not sent, no sign of loss on the way. Also: the device is not there.
    Refused,
    /// Larger than the interface takes.
    TooBig,
    /// No route, no neighbour, or a filter's verdict.
    Unreachable,
    /// No memory.
    NoMemory,
}

/// Where a packet goes and how: what its IP and UDP headers say.
pub struct Headers {
    /// GIDs of both ends, of one family.
    pub source: [u8; 16],
    /// See `source`.
    pub destination: [u8; 16],
    /// Type of service or traffic class, with the ECN bits.
    pub class: u8,
    /// Time to live or hop limit.
    pub hop_limit: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// UDP ports.
    pub source_port: u16,
    /// See `source_port`.
    pub destination_port: u16,
    /// Put a UDP checksum in.
    pub checksum: bool,
    /// IP may fragment it.
    pub may_fragment: bool,
    /// What queues and interfaces tell flows apart by.
    pub hash: u32,
}

/// IP protocol number of UDP.
const UDP: u8 = 17;

/// Smallest MTU of IPv6; fragments of this size pass everywhere.
const IPV6_MIN_MTU: u32 = 1280;

/// A packet that is being made, or a train of packets of one flow. Its header is its own;
/// pages behind it may belong to a program.
///
/// A train is one `sk_buff` with the others on its fragment list. It passes the IP stack,
/// queues and software interfaces as one packet, and comes apart, without any copy, in
/// front of a network card or of the receiver. Its UDP checksums, if any, are complete (but see
/// [`TxSkb::couple`]), and it says so: a receiver on this machine does not look at them again.
pub struct TxSkb {
    skb: NonNull<bindings::sk_buff>,
    /// The last packet of the train; dangling while there is one.
    tail: NonNull<bindings::sk_buff>,
    /// Packets.
    count: u16,
    /// Bytes behind the UDP header of the first one, and of the last one.
    first: u32,
    last: u32,
    /// Bytes of IP and UDP header, once they are there.
    headers: u32,
    /// The UDP checksum is left to the network card.
    partial: bool,
}

// SAFETY: As for `Skb`.
unsafe impl Send for TxSkb {}

/// Bytes of a train at the most: IP has 16 bits for it.
const TRAIN: u32 = 60_000;

impl TxSkb {
    /// A packet with `header` in front of `payload` bytes still to come: `tail` of them
    /// linear ([`TxSkb::put`]), the others in pages of its own ([`TxSkb::fill`]) or in the
    /// pages of others ([`TxSkb::add_page`]). Room is left for the headers of `dst`.
    pub fn new(dst: DstRef<'_>, header: &[u8], tail: u32, paged: u32) -> Option<Self> {
        let headroom = dst.headroom() + IPV6_LEN + UDP_LEN;
        let header_len = u32::try_from(header.len()).ok()?;
        let linear = headroom.checked_add(header_len)?.checked_add(tail)?;
        let mut errno = 0;
        // SAFETY: May be called in every context with these flags.
        let skb = unsafe {
            bindings::alloc_skb_with_frags(
                linear as usize,
                paged as usize,
                0,
                &mut errno,
                bindings::GFP_ATOMIC_NOWARN as bindings::gfp_t,
            )
        };
        let skb = NonNull::new(skb)?;
        let mut skb = Self {
            skb,
            tail: skb,
            count: 1,
            first: 0,
            last: 0,
            headers: 0,
            partial: false,
        };
        // SAFETY: A new packet with at least `headroom` bytes.
        unsafe { bindings::metaroce_skb_reserve(skb.as_ptr(), headroom) };
        skb.put(header);
        // The pages count from now on (`alloc_skb_with_frags` leaves that to its caller).
        // SAFETY: `self` owns the packet.
        let raw = unsafe { skb.skb.as_mut() };
        raw.len += paged;
        raw.data_len += paged;
        Some(skb)
    }

    fn as_ptr(&self) -> *mut bindings::sk_buff {
        self.skb.as_ptr()
    }

    /// Bytes so far.
    fn bytes(&self) -> u32 {
        // SAFETY: `self` owns the packet.
        unsafe { self.skb.as_ref() }.len
    }

    /// Appends bytes to the linear part, within what was asked for in `new`.
    pub fn put(&mut self, bytes: &[u8]) {
        if let Some(to) = self.put_space(bytes.len()) {
            to.copy_from_slice(bytes);
        }
    }

    /// Appends `len` bytes to the linear part, to be filled in; `None` when there is no room.
    pub fn put_space(&mut self, len: usize) -> Option<&mut [u8]> {
        let len32 = u32::try_from(len).ok()?;
        // SAFETY: `self` owns the packet.
        if unsafe { bindings::metaroce_skb_tailroom(self.as_ptr()) } < len32 {
            return None;
        }
        // SAFETY: There is room, and nothing else refers to it.
        Some(unsafe {
            let at = bindings::metaroce_skb_put(self.as_ptr(), len32).cast::<u8>();
            at.write_bytes(0, len);
            slice::from_raw_parts_mut(at, len)
        })
    }

    /// Calls `f` with each piece of the packet's own pages and the number of bytes ahead of
    /// it, until it says `false`.
    pub fn fill(&mut self, mut f: impl FnMut(usize, &mut [u8]) -> bool) -> bool {
        let mut at = 0;
        // SAFETY: `self` owns the packet.
        let n = unsafe { bindings::metaroce_skb_nr_frags(self.as_ptr()) };
        for i in 0..n {
            // SAFETY: `i` is below the number of fragments. Pages of `alloc_skb_with_frags`
            // are not in high memory on 64-bit machines, and belong to this packet.
            let piece = unsafe {
                let len = bindings::metaroce_skb_frag_size(self.as_ptr(), i) as usize;
                let base = bindings::metaroce_skb_frag_address(self.as_ptr(), i);
                slice::from_raw_parts_mut(base.cast::<u8>(), len)
            };
            let len = piece.len();
            if !f(at, piece) {
                return false;
            }
            at += len;
        }
        true
    }

    /// Appends a piece of a page by reference; `false` (and the reference is given back)
    /// when the packet has as many as it can.
    pub fn add_page(&mut self, page: PageRef) -> bool {
        // SAFETY: `self` owns the packet.
        let n = unsafe { bindings::metaroce_skb_nr_frags(self.as_ptr()) };
        if n as usize >= MAX_PAGES {
            return false;
        }
        let (offset, len) = (page.offset(), page.len());
        // SAFETY: There is room for a fragment, and the reference passes to the packet.
        unsafe {
            bindings::metaroce_skb_add_rx_frag(
                self.as_ptr(),
                n as i32,
                page.into_raw(),
                offset as i32,
                len as i32,
                len,
            );
            bindings::metaroce_skb_set_shared_frag(self.as_ptr());
        }
        true
    }

    /// CRC32C of the whole packet, with the bytes at `hole..hole + 4` taken as 0, and puts
    /// it there in network order. The hole lies in the header.
    pub fn seal(&mut self, hole: usize) -> bool {
        let mut crc = Crc32c::begin();
        let reader = SkbReader {
            skb: self.skb,
            _skb: PhantomData,
        };
        if !crc.update_skb(reader, 0) {
            return false;
        }
        // SAFETY: `self` owns the packet, whose linear part begins with the header.
        let linear = unsafe {
            let raw = self.skb.as_ref();
            slice::from_raw_parts_mut(raw.data, raw.len.saturating_sub(raw.data_len) as usize)
        };
        match linear.get_mut(hole..).and_then(|b| b.first_chunk_mut()) {
            Some(field) => {
                *field = crc.finish().to_be_bytes();
                true
            }
            None => false,
        }
    }

    /// Puts UDP and IP headers in front.
    pub fn add_headers(&mut self, sock: Sock<'_>, h: &Headers) {
        let skb = self.as_ptr();
        self.first = self.bytes();
        self.last = self.first;
        self.partial = h.checksum;
        // SAFETY: The packet is owned, and was made with room for these headers.
        unsafe {
            let udp = bindings::metaroce_skb_push(skb, UDP_LEN).cast::<[u8; 8]>();
            let udp_len = (*skb).len;
            let [a, b] = h.source_port.to_be_bytes();
            let [c, d] = h.destination_port.to_be_bytes();
            let [e, f] = (udp_len as u16).to_be_bytes();
            udp.write([a, b, c, d, e, f, 0, 0]);
            bindings::metaroce_skb_reset_transport_header(skb);
            match (ipv4_of(&h.source), ipv4_of(&h.destination)) {
                (Some(source), Some(destination)) => {
                    add_ipv4(skb, sock, h, udp_len, source, destination);
                    self.headers = IPV4_LEN + UDP_LEN;
                }
                _ => {
                    add_ipv6(skb, h, udp_len);
                    self.headers = IPV6_LEN + UDP_LEN;
                }
            }
        }
    }

    /// Couples `next`, which has the same headers, to the train; gives it back when it does
    /// not fit. All packets are as long as the first one, but the last may be shorter. Their
    /// checksums are complete then, unless `later`: what takes a train apart leaves them to
    /// the network card, and whoever has none that computes them may not ask for it.
    pub fn couple(&mut self, mut next: TxSkb, later: bool) -> Result<(), TxSkb> {
        let fits = self.last == self.first
            && next.first <= self.first
            && next.count == 1
            && self.headers != 0
            && next.headers == self.headers
            && self.bytes() + next.first <= TRAIN;
        if !fits {
            return Err(next);
        }
        if !(later && self.partial && next.partial) {
            self.complete_checksum();
            next.complete_checksum();
        }
        let next = ManuallyDrop::new(next);
        let (skb, new) = (self.as_ptr(), next.as_ptr());
        // SAFETY: Both packets are owned, with all headers in front; `new` passes to the
        // train. Its headers stay in its headroom, where the stack looks for them when the
        // train comes apart.
        unsafe {
            bindings::metaroce_skb_pull(new, next.headers);
            if self.count == 1 {
                bindings::metaroce_skb_set_frag_list(skb, new);
            } else {
                bindings::metaroce_skb_set_next(self.tail.as_ptr(), new);
            }
            (*skb).len += (*new).len;
            (*skb).data_len += (*new).len;
            (*skb).truesize += (*new).truesize;
        }
        self.tail = next.skb;
        self.last = next.first;
        self.count += 1;
        Ok(())
    }

    /// Computes the UDP checksum when that was left to the network card.
    fn complete_checksum(&mut self) {
        if !::core::mem::take(&mut self.partial) {
            return;
        }
        let skb = self.as_ptr();
        let ip_len = self.headers - UDP_LEN;
        // SAFETY: The packet is owned; it begins with its IP header, and has nothing coupled
        // to it (a train has no such checksums). The checksum field holds the sum of the
        // pseudo header.
        unsafe {
            let sum = bindings::skb_checksum(
                skb,
                ip_len as i32,
                (*skb).len.saturating_sub(ip_len) as i32,
                0,
            );
            bindings::metaroce_udp_set_check(skb, sum);
        }
    }

    /// Hands packet or train, with its headers, to the stack.
    pub fn send(self, sock: Sock<'_>, dst: DstRef<'_>, h: &Headers) -> Result<(), XmitError> {
        let this = ManuallyDrop::new(self);
        let skb = this.as_ptr();
        let ipv6 = this.headers == IPV6_LEN + UDP_LEN;
        let net = sock.net().as_ptr();
        // SAFETY: The packet is owned and passes to the stack; route and socket live as long
        // as the RCU read lock that `dst` and `sock` stand for, the namespace as long as its
        // socket.
        let code = unsafe {
            bindings::metaroce_skb_set_l4_hash(skb, h.hash);
            bindings::metaroce_skb_set_priority(skb, bindings::metaroce_rt_tos2priority(h.class));
            bindings::metaroce_skb_dst_set_noref(skb, dst.as_ptr());
            if this.count > 1 {
                let ip_len = this.headers - UDP_LEN;
                let [a, b] = ((*skb).len.saturating_sub(ip_len) as u16).to_be_bytes();
                let udp = bindings::metaroce_skb_transport_header(skb).cast::<[u8; 8]>();
                (*udp)[4] = a;
                (*udp)[5] = b;
                bindings::metaroce_skb_set_gso_fraglist(
                    skb,
                    this.first as u16,
                    this.count,
                    this.partial,
                );
            }
            if ipv6 {
                // Through the socket the stack learns that we find out path MTUs ourselves.
                bindings::metaroce_skb_set_owner_sk_safe(skb, sock.as_ptr());
                bindings::ip6_local_out(net, sock.as_ptr(), skb)
            } else {
                bindings::ip_local_out(net, sock.as_ptr(), skb)
            }
        };
        match code {
            0 | NET_XMIT_CN => Ok(()),
            NET_XMIT_DROP => Err(XmitError::Refused),
            e if e == -(bindings::ENOBUFS as i32) => Err(XmitError::Refused),
            e if e == -(bindings::ENOMEM as i32) => Err(XmitError::NoMemory),
            e if e == -(bindings::EMSGSIZE as i32) => Err(XmitError::TooBig),
            _ => Err(XmitError::Unreachable),
        }
    }
}

impl Drop for TxSkb {
    fn drop(&mut self) {
        // SAFETY: `self` owns the packet.
        unsafe { bindings::metaroce_consume_skb(self.as_ptr()) };
    }
}

/// # Safety
///
/// `skb` is owned, begins with its UDP header, and has room for an IPv4 header in front.
unsafe fn add_ipv4(
    skb: *mut bindings::sk_buff,
    sock: Sock<'_>,
    h: &Headers,
    udp_len: u32,
    source: [u8; 4],
    destination: [u8; 4],
) {
    // SAFETY: Guaranteed by the caller; the namespace lives as long as its socket.
    unsafe {
        bindings::udp_set_csum(
            !h.checksum,
            skb,
            u32::from_ne_bytes(source),
            u32::from_ne_bytes(destination),
            udp_len as i32,
        );
        let ip = bindings::metaroce_skb_push(skb, IPV4_LEN).cast::<[u8; 20]>();
        let [a, b, c, d] = source;
        let [e, f, g, i] = destination;
        // Length, identification and header checksum follow.
        let flags = if h.may_fragment { 0 } else { 0x40 };
        ip.write([
            0x45,
            h.class,
            0,
            0,
            0,
            0,
            flags,
            0,
            h.hop_limit,
            UDP,
            0,
            0,
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            i,
        ]);
        bindings::metaroce_skb_reset_network_header(skb);
        if h.may_fragment {
            bindings::__ip_select_ident(sock.net().as_ptr(), ip.cast(), 1);
        }
    }
}

/// # Safety
///
/// As for [`add_ipv4`], for IPv6.
unsafe fn add_ipv6(skb: *mut bindings::sk_buff, h: &Headers, udp_len: u32) {
    let source = in6(&h.source);
    let destination = in6(&h.destination);
    // SAFETY: Guaranteed by the caller.
    unsafe {
        bindings::udp6_set_csum(!h.checksum, skb, &source, &destination, udp_len as i32);
        let ip = bindings::metaroce_skb_push(skb, IPV6_LEN).cast::<bindings::ipv6hdr>();
        bindings::metaroce_ip6_flow_hdr(ip, h.class.into(), h.flow_label);
        (*ip).payload_len = (udp_len as u16).to_be();
        (*ip).nexthdr = UDP;
        (*ip).hop_limit = h.hop_limit;
        bindings::metaroce_ip6_set_addresses(ip, &source, &destination);
        bindings::metaroce_skb_reset_network_header(skb);
        if h.may_fragment {
            bindings::metaroce_skb_fragment6(skb, IPV6_MIN_MTU as u16);
        }
    }
}
