// SPDX-License-Identifier: GPL-2.0
//! Safe wrappers over libibverbs: each object keeps what it was made from alive and is
//! destroyed when its last user drops it. Objects may be shared between threads, as verbs
//! promise.
//!
//! Memory is named by address and key. The device checks every address against the key, so
//! a wrong one gives an error completion; only inline data is read by the library itself,
//! and therefore has to come from [`Mr::sge`].
//!
//! Unsafe because it calls C functions and reads their structures; what it offers is safe.

use crate::ffi;
use crate::sys::{self, Memory};
use std::ffi::CStr;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use ffi::{
    ibv_wc as Wc, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_ATOMIC_NONE,
    IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_PATH_MIG,
    IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_LIMIT_REACHED,
    IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_256, IBV_MTU_4096,
    IBV_MTU_512, IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_PORT_ACTIVE, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPT_RAW_PACKET, IBV_QPT_RC, IBV_QPT_UC,
    IBV_QPT_UD, IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CAP, IBV_QP_CUR_STATE,
    IBV_QP_DEST_QPN, IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MIG_STATE, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WC_BIND_MW,
    IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_LOCAL_INV, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_LOC_QP_OP_ERR, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SEND, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WITH_INV,
    IBV_WC_WR_FLUSH_ERR, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, IBV_WR_TSO,
};

/// Attributes of a device.
pub type DeviceAttr = ffi::ibv_device_attr;
/// Attributes of a port.
pub type PortAttr = ffi::ibv_port_attr;
/// Attributes of a QP.
pub type QpAttr = ffi::ibv_qp_attr;
/// Sizes of the queues of a QP.
pub type QpCap = ffi::ibv_qp_cap;

/// A zeroed structure to fill in, as C programs do.
pub fn zeroed<T: Default>() -> T {
    T::default()
}

fn errno(result: i32) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(last_error()),
        n => Err(io::Error::from_raw_os_error(n.abs())),
    }
}

fn last_error() -> io::Error {
    io::Error::last_os_error()
}

/// Names and node GUIDs (host order) of the devices that libibverbs offers.
pub fn devices() -> io::Result<Vec<(String, u64)>> {
    let mut count = 0;
    // SAFETY: the library fills `count` and returns a list or NULL.
    let list = unsafe { ffi::ibv_get_device_list(&mut count) };
    if list.is_null() {
        return Err(last_error());
    }
    let mut out = Vec::new();
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: i < count; entries are valid until the list is freed below.
        unsafe {
            let device = *list.add(i);
            out.push((name_of(device), u64::from_be(ffi::ibv_get_device_guid(device))));
        }
    }
    // SAFETY: the list came from ibv_get_device_list and is not used after this.
    unsafe { ffi::ibv_free_device_list(list) };
    Ok(out)
}

/// # Safety
/// `device` must be valid.
unsafe fn name_of(device: *mut ffi::ibv_device) -> String {
    // SAFETY: the library returns the name inside the valid device.
    unsafe { CStr::from_ptr(ffi::ibv_get_device_name(device)) }.to_string_lossy().into_owned()
}

/// An open device.
pub struct Context {
    raw: *mut ffi::ibv_context,
    /// Name, as `ibv_devices` prints it.
    pub name: String,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// For `dv`.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw
    }

    /// Opens the device `name`, or the only one there is.
    pub fn open(name: Option<&str>) -> io::Result<Arc<Self>> {
        let mut count = 0;
        // SAFETY: as in `devices`.
        let list = unsafe { ffi::ibv_get_device_list(&mut count) };
        if list.is_null() {
            return Err(last_error());
        }
        let mut raw = std::ptr::null_mut();
        let mut found = String::new();
        let mut error = io::Error::new(
            io::ErrorKind::NotFound,
            match name {
                Some(name) => format!("libibverbs offers no device '{name}'"),
                None => format!("libibverbs offers {count} devices, name one with --dev"),
            },
        );
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: as in `devices`.
            unsafe {
                let device = *list.add(i);
                let this = name_of(device);
                if name.map_or(count == 1, |name| name == this) {
                    raw = ffi::ibv_open_device(device);
                    if raw.is_null() {
                        error = last_error();
                    }
                    found = this;
                    break;
                }
            }
        }
        // SAFETY: not used after this; an open device stays valid without the list.
        unsafe { ffi::ibv_free_device_list(list) };
        if raw.is_null() {
            return Err(error);
        }
        Ok(Arc::new(Context { raw, name: found }))
    }

    /// The driver id is in the kernel's device; the name of the uverbs node is here.
    pub fn node(&self) -> String {
        // SAFETY: the context is open, its device is valid.
        unsafe { CStr::from_ptr((*(*self.raw).device).dev_name.as_ptr()) }.to_string_lossy().into_owned()
    }

    /// Descriptor of the command file.
    pub fn cmd_fd(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.raw).cmd_fd }
    }

    /// Attributes of the device.
    pub fn query_device(&self) -> io::Result<DeviceAttr> {
        let mut attr = zeroed();
        // SAFETY: the library fills one structure.
        errno(unsafe { ffi::ibv_query_device(self.raw, &mut attr) })?;
        Ok(attr)
    }

    /// Attributes of port `port`, from 1.
    pub fn query_port(&self, port: u8) -> io::Result<PortAttr> {
        let mut attr = zeroed();
        // SAFETY: the library fills one structure.
        errno(unsafe { ffi::___ibv_query_port(self.raw, port, &mut attr) })?;
        Ok(attr)
    }

    /// The GIDs of port 1: index, type (`IBV_GID_TYPE_*`), bytes.
    pub fn gids(&self) -> io::Result<Vec<(u32, u32, [u8; 16])>> {
        let mut table = vec![ffi::ibv_gid_entry::default(); 256];
        // SAFETY: the table has as many entries as the call is told.
        let n = unsafe { ffi::ibv_query_gid_table(self.raw, table.as_mut_ptr(), table.len(), 0) };
        let n = usize::try_from(n).map_err(|_| io::Error::from_raw_os_error(-(n as i32)))?;
        Ok(table
            .iter()
            .take(n)
            // SAFETY: a union of bytes and integers, all bits valid.
            .map(|entry| (entry.gid_index, entry.gid_type, unsafe { entry.gid.raw }))
            .collect())
    }

    /// One GID of port 1.
    pub fn gid(&self, index: u32) -> io::Result<[u8; 16]> {
        let mut gid = ffi::ibv_gid::default();
        // SAFETY: the library fills one GID.
        errno(unsafe { ffi::ibv_query_gid(self.raw, 1, i32::try_from(index).unwrap_or(-1), &mut gid) })?;
        // SAFETY: a union of bytes and integers, all bits valid.
        Ok(unsafe { gid.raw })
    }

    /// A protection domain.
    pub fn alloc_pd(self: &Arc<Self>) -> io::Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(self.raw) };
        if raw.is_null() {
            return Err(last_error());
        }
        Ok(Arc::new(Pd { raw, context: self.clone() }))
    }

    /// A completion channel.
    pub fn create_channel(self: &Arc<Self>) -> io::Result<Arc<Channel>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_create_comp_channel(self.raw) };
        if raw.is_null() {
            return Err(last_error());
        }
        let channel = Channel { raw, context: self.clone() };
        sys::set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    /// A CQ of at least `entries`, whose events go to `channel`.
    pub fn create_cq(self: &Arc<Self>, entries: u32, channel: Option<&Arc<Channel>>) -> io::Result<Arc<Cq>> {
        let raw_channel = channel.map_or(std::ptr::null_mut(), |c| c.raw);
        // SAFETY: the context is open, the channel is NULL or valid; the CQ keeps both.
        let raw = unsafe {
            ffi::ibv_create_cq(
                self.raw,
                i32::try_from(entries).unwrap_or(i32::MAX),
                std::ptr::null_mut(),
                raw_channel,
                0,
            )
        };
        if raw.is_null() {
            return Err(last_error());
        }
        Ok(Arc::new(Cq { raw, context: self.clone(), channel: channel.cloned(), events: Mutex::new(()) }))
    }

    /// The errno of ibv_create_cq_ex with the given wc flags, completion mask and flags; 0 when it worked.
    pub fn try_create_cq_ex(&self, wc_flags: u64, comp_mask: u32, flags: u32) -> i32 {
        let mut attr = ffi::ibv_cq_init_attr_ex {
            cqe: 16,
            wc_flags,
            comp_mask,
            flags,
            ..ffi::ibv_cq_init_attr_ex::default()
        };
        // SAFETY: the context is open; a CQ that was made is destroyed at once.
        unsafe {
            let cq = ffi::ibv_create_cq_ex(self.raw, &mut attr);
            if cq.is_null() {
                return last_error().raw_os_error().unwrap_or(0);
            }
            ffi::ibv_destroy_cq(ffi::ibv_cq_ex_to_cq(cq));
        }
        0
    }

    /// The next asynchronous event, as (type, QP number or 0); None after `timeout`. It is acknowledged.
    pub fn next_event(&self, timeout: Duration) -> io::Result<Option<(u32, u32)>> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.raw).async_fd };
        if !sys::wait_readable(fd, timeout)? {
            return Ok(None);
        }
        let mut event = ffi::ibv_async_event::default();
        // SAFETY: the library fills one event; it is acknowledged below, exactly once.
        errno(unsafe { ffi::ibv_get_async_event(self.raw, &mut event) })?;
        let kind = event.event_type;
        let qpn = match kind {
            ffi::IBV_EVENT_QP_FATAL
            | ffi::IBV_EVENT_QP_REQ_ERR
            | ffi::IBV_EVENT_QP_ACCESS_ERR
            | ffi::IBV_EVENT_COMM_EST
            | ffi::IBV_EVENT_SQ_DRAINED
            | ffi::IBV_EVENT_PATH_MIG
            | ffi::IBV_EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: these events carry a QP, which lives until its events are acknowledged.
                unsafe { (*event.element.qp).qp_num }
            }
            _ => 0,
        };
        // SAFETY: the event came from ibv_get_async_event.
        unsafe { ffi::ibv_ack_async_event(&mut event) };
        Ok(Some((kind, qpn)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context held it and is gone.
        unsafe { ffi::ibv_close_device(self.raw) };
    }
}

/// Name of an asynchronous event.
pub fn event_name(kind: u32) -> String {
    // SAFETY: returns a constant string for any number.
    unsafe { CStr::from_ptr(ffi::ibv_event_type_str(kind)) }.to_string_lossy().into_owned()
}

/// Name of a completion status.
pub fn status_name(status: u32) -> String {
    // SAFETY: returns a constant string for any number.
    unsafe { CStr::from_ptr(ffi::ibv_wc_status_str(status)) }.to_string_lossy().into_owned()
}

/// A protection domain.
pub struct Pd {
    raw: *mut ffi::ibv_pd,
    /// The device.
    pub context: Arc<Context>,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Registers `len` bytes at `offset` of `memory`.
    pub fn reg_mr(
        self: &Arc<Self>,
        memory: &Arc<Memory>,
        offset: usize,
        len: usize,
        access: u32,
    ) -> io::Result<Arc<Mr>> {
        assert!(offset + len <= memory.len());
        let addr = memory.addr() + offset as u64;
        // SAFETY: the range is mapped; the MR keeps the memory.
        let raw = unsafe { ffi::ibv_reg_mr_iova2(self.raw, addr as *mut _, len, addr, access) };
        if raw.is_null() {
            return Err(last_error());
        }
        // SAFETY: the MR was just made.
        let (lkey, rkey) = unsafe { ((*raw).lkey, (*raw).rkey) };
        Ok(Arc::new(Mr { raw, pd: self.clone(), memory: memory.clone(), base: offset, len, lkey, rkey }))
    }

    /// Registers all of `memory`.
    pub fn reg(self: &Arc<Self>, memory: &Arc<Memory>, access: u32) -> io::Result<Arc<Mr>> {
        self.reg_mr(memory, 0, memory.len(), access)
    }

    /// The errno of registering a range given by numbers, of which nothing is used; 0 when it worked.
    pub fn try_reg_mr(&self, addr: u64, len: usize, access: u32) -> i32 {
        // SAFETY: the kernel checks the range; the MR is gone at once.
        unsafe {
            let mr = ffi::ibv_reg_mr_iova2(self.raw, addr as *mut _, len, addr, access);
            if mr.is_null() {
                return last_error().raw_os_error().unwrap_or(0);
            }
            ffi::ibv_dereg_mr(mr);
        }
        0
    }

    /// The errno of ibv_reg_dmabuf_mr with descriptor `fd`; 0 when it worked.
    pub fn try_reg_dmabuf_mr(&self, fd: RawFd) -> i32 {
        // SAFETY: the kernel checks the descriptor; the MR is gone at once.
        unsafe {
            let mr = ffi::ibv_reg_dmabuf_mr(self.raw, 0, 4096, 0, fd, ffi::IBV_ACCESS_LOCAL_WRITE as i32);
            if mr.is_null() {
                return last_error().raw_os_error().unwrap_or(0);
            }
            ffi::ibv_dereg_mr(mr);
        }
        0
    }

    /// A memory window of type `kind` (`IBV_MW_TYPE_*`).
    pub fn alloc_mw(self: &Arc<Self>, kind: u32) -> io::Result<Mw> {
        // SAFETY: the PD is valid.
        let raw = unsafe { ffi::ibv_alloc_mw(self.raw, kind) };
        if raw.is_null() {
            return Err(last_error());
        }
        Ok(Mw { raw, _pd: self.clone() })
    }

    /// A shared receive queue.
    pub fn create_srq(self: &Arc<Self>, max_wr: u32, max_sge: u32) -> io::Result<Arc<Srq>> {
        let mut attr = ffi::ibv_srq_init_attr {
            attr: ffi::ibv_srq_attr { max_wr, max_sge, srq_limit: 0 },
            ..ffi::ibv_srq_init_attr::default()
        };
        // SAFETY: the PD is valid, the attributes are read and written during the call.
        let raw = unsafe { ffi::ibv_create_srq(self.raw, &mut attr) };
        if raw.is_null() {
            return Err(last_error());
        }
        Ok(Arc::new(Srq { raw, _pd: self.clone(), max_wr: attr.attr.max_wr }))
    }

    /// A QP.
    pub fn create_qp(self: &Arc<Self>, init: &QpInit) -> io::Result<Arc<Qp>> {
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: init.send_cq.raw,
            recv_cq: init.recv_cq.raw,
            srq: init.srq.as_ref().map_or(std::ptr::null_mut(), |srq| srq.raw),
            cap: init.cap,
            qp_type: init.kind,
            sq_sig_all: i32::from(init.signal_all),
            ..ffi::ibv_qp_init_attr::default()
        };
        // SAFETY: CQs, SRQ and PD are valid, and kept by the QP.
        let raw = unsafe { ffi::ibv_create_qp(self.raw, &mut attr) };
        if raw.is_null() {
            return Err(last_error());
        }
        // SAFETY: the QP was just made.
        let number = unsafe { (*raw).qp_num };
        Ok(Arc::new(Qp {
            raw,
            number,
            cap: attr.cap,
            pd: self.clone(),
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            srq: init.srq.clone(),
        }))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: everything made from the PD held it and is gone.
        unsafe { ffi::ibv_dealloc_pd(self.raw) };
    }
}

/// Registered memory.
pub struct Mr {
    raw: *mut ffi::ibv_mr,
    /// The protection domain.
    pub pd: Arc<Pd>,
    /// What is registered (a part of it, see `base` and `len`).
    pub memory: Arc<Memory>,
    /// Offset in `memory` where the registration begins.
    pub base: usize,
    /// Bytes registered.
    pub len: usize,
    /// Local key.
    pub lkey: u32,
    /// Remote key, host order.
    pub rkey: u32,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Address of offset `offset`.
    pub fn addr(&self, offset: usize) -> u64 {
        self.memory.addr() + (self.base + offset) as u64
    }

    /// `len` bytes at `offset`, which lie inside the registration.
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        assert!(offset + len <= self.len, "{offset} + {len} > {}", self.len);
        Sge { addr: self.addr(offset), length: len as u32, lkey: self.lkey, mapped: true }
    }

    /// ibv_rereg_mr that changes the access flags.
    pub fn rereg_access(&self, access: u32) -> io::Result<()> {
        // SAFETY: the MR and its PD are valid; only flags change.
        let result = unsafe {
            ffi::ibv_rereg_mr(
                self.raw,
                ffi::IBV_REREG_MR_CHANGE_ACCESS as i32,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
                access as i32,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(last_error())
        }
    }

    /// ibv_rereg_mr that moves the region to `pd` and `memory` with other access flags. It outlives
    /// neither.
    pub fn rereg_all(&self, pd: &Pd, memory: &Memory, access: u32) -> io::Result<()> {
        let what = ffi::IBV_REREG_MR_CHANGE_TRANSLATION
            | ffi::IBV_REREG_MR_CHANGE_PD
            | ffi::IBV_REREG_MR_CHANGE_ACCESS;
        // SAFETY: MR and PD are valid, the range is mapped.
        let result = unsafe {
            ffi::ibv_rereg_mr(
                self.raw,
                what as i32,
                pd.raw,
                memory.addr() as *mut _,
                memory.len(),
                access as i32,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(last_error())
        }
    }

    /// The keys as they are now (a re-registration may change them).
    pub fn keys(&self) -> (u32, u32) {
        // SAFETY: the MR is valid.
        unsafe { ((*self.raw).lkey, (*self.raw).rkey) }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the only owner goes.
        unsafe { ffi::ibv_dereg_mr(self.raw) };
    }
}

/// A memory window.
pub struct Mw {
    raw: *mut ffi::ibv_mw,
    _pd: Arc<Pd>,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    /// The remote key as it is now.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window is valid.
        unsafe { (*self.raw).rkey }
    }

    /// A key for the next bind of a type 2 window.
    pub fn next_rkey(&self) -> u32 {
        // SAFETY: arithmetic only.
        unsafe { ffi::ibv_inc_rkey(self.rkey()) }
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the only owner goes.
        unsafe { ffi::ibv_dealloc_mw(self.raw) };
    }
}

/// A completion channel.
pub struct Channel {
    raw: *mut ffi::ibv_comp_channel,
    /// The device.
    pub context: Arc<Context>,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// The descriptor to poll.
    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel is valid.
        unsafe { (*self.raw).fd }
    }

    /// Takes one event and acknowledges it; false when none came within `timeout`.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let end = Instant::now() + timeout;
        loop {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the library fills both pointers.
            if unsafe { ffi::ibv_get_cq_event(self.raw, &mut cq, &mut context) } == 0 {
                // SAFETY: the CQ lives until its events are acknowledged.
                unsafe { ffi::ibv_ack_cq_events(cq, 1) };
                return Ok(true);
            }
            let error = last_error();
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !sys::wait_readable(self.fd(), left)? {
                return Ok(false);
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: CQs that use the channel held it and are gone.
        unsafe { ffi::ibv_destroy_comp_channel(self.raw) };
    }
}

/// A completion queue.
pub struct Cq {
    raw: *mut ffi::ibv_cq,
    /// The device.
    pub context: Arc<Context>,
    /// Where events go.
    pub channel: Option<Arc<Channel>>,
    events: Mutex<()>,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Entries of the CQ.
    pub fn entries(&self) -> u32 {
        // SAFETY: the CQ is valid.
        u32::try_from(unsafe { (*self.raw).cqe }).unwrap_or(0)
    }

    /// Moves up to `out.len()` completions into `out`; gives how many.
    pub fn poll(&self, out: &mut [Wc]) -> io::Result<usize> {
        // SAFETY: `out` has as many entries as the call is told.
        let n = unsafe {
            ffi::ibv_poll_cq(self.raw, i32::try_from(out.len()).unwrap_or(i32::MAX), out.as_mut_ptr())
        };
        usize::try_from(n).map_err(|_| io::Error::other(format!("ibv_poll_cq returned {n}")))
    }

    /// Polls until a completion comes; None after `timeout`.
    pub fn poll_one(&self, timeout: Duration) -> io::Result<Option<Wc>> {
        let end = Instant::now() + timeout;
        let mut wc = [Wc::default()];
        let mut idle = 0u32;
        loop {
            if self.poll(&mut wc)? == 1 {
                return Ok(Some(wc[0]));
            }
            idle += 1;
            if idle % 64 == 0 {
                if Instant::now() > end {
                    return Ok(None);
                }
                sys::yield_now();
            }
        }
    }

    /// Asks for an event at the next completion (solicited or failed only, if told so).
    pub fn arm(&self, solicited_only: bool) -> io::Result<()> {
        // SAFETY: the CQ is valid.
        errno(unsafe { ffi::ibv_req_notify_cq(self.raw, i32::from(solicited_only)) })
    }

    /// Changes the number of entries.
    pub fn resize(&self, entries: u32) -> io::Result<()> {
        let _one_at_a_time = self.events.lock();
        // SAFETY: the CQ is valid.
        errno(unsafe { ffi::ibv_resize_cq(self.raw, i32::try_from(entries).unwrap_or(i32::MAX)) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: QPs that use the CQ held it and are gone.
        unsafe { ffi::ibv_destroy_cq(self.raw) };
    }
}

/// A shared receive queue.
pub struct Srq {
    raw: *mut ffi::ibv_srq,
    _pd: Arc<Pd>,
    /// Receives it holds.
    pub max_wr: u32,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// Posts one receive.
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> io::Result<()> {
        let (mut list, _keep) = recv_wr(wr_id, sges);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the WR and its SGEs live during the call.
        errno(unsafe { ffi::ibv_post_srq_recv(self.raw, &mut list, &mut bad) })
    }

    /// Asks for an event when fewer than `limit` receives are left.
    pub fn set_limit(&self, limit: u32) -> io::Result<()> {
        let mut attr = ffi::ibv_srq_attr { srq_limit: limit, ..ffi::ibv_srq_attr::default() };
        // SAFETY: one structure, read during the call.
        errno(unsafe { ffi::ibv_modify_srq(self.raw, &mut attr, ffi::IBV_SRQ_LIMIT as i32) })
    }

    /// The limit as it is now.
    pub fn limit(&self) -> io::Result<u32> {
        let mut attr = ffi::ibv_srq_attr::default();
        // SAFETY: the library fills one structure.
        errno(unsafe { ffi::ibv_query_srq(self.raw, &mut attr) })?;
        Ok(attr.srq_limit)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: QPs that use the SRQ held it and are gone.
        unsafe { ffi::ibv_destroy_srq(self.raw) };
    }
}

/// What a QP is made of.
pub struct QpInit {
    /// For completions of sends.
    pub send_cq: Arc<Cq>,
    /// For completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Where receives come from, instead of an own queue.
    pub srq: Option<Arc<Srq>>,
    /// Queue sizes.
    pub cap: QpCap,
    /// `IBV_QPT_*`.
    pub kind: u32,
    /// Every send completes visibly.
    pub signal_all: bool,
}

impl QpInit {
    /// An RC QP with both queues of `depth`, `sge` SGEs and `inline` bytes of inline data.
    pub fn rc(send_cq: &Arc<Cq>, recv_cq: &Arc<Cq>, depth: u32, sge: u32, inline: u32) -> Self {
        QpInit {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            cap: QpCap {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: sge,
                max_recv_sge: sge,
                max_inline_data: inline,
            },
            kind: IBV_QPT_RC,
            signal_all: false,
        }
    }
}

/// A range of local memory.
#[derive(Clone, Copy, Debug)]
pub struct Sge {
    addr: u64,
    length: u32,
    lkey: u32,
    mapped: bool,
}

impl Sge {
    /// Any numbers: for requests that must fail, or keys of one's own choice. Not for inline data.
    pub fn raw(addr: u64, length: u32, lkey: u32) -> Self {
        Sge { addr, length, lkey, mapped: false }
    }

    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// True for no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

fn raw_sges(sges: &[Sge]) -> Vec<ffi::ibv_sge> {
    sges.iter().map(|s| ffi::ibv_sge { addr: s.addr, length: s.length, lkey: s.lkey }).collect()
}

fn recv_wr(wr_id: u64, sges: &[Sge]) -> (ffi::ibv_recv_wr, Vec<ffi::ibv_sge>) {
    let mut list = raw_sges(sges);
    let wr = ffi::ibv_recv_wr {
        wr_id,
        next: std::ptr::null_mut(),
        sg_list: list.as_mut_ptr(),
        num_sge: i32::try_from(list.len()).unwrap_or(i32::MAX),
    };
    (wr, list)
}

/// A memory window's new binding, for [`Qp::post_bind`].
#[derive(Clone, Copy)]
pub struct Bind<'a> {
    /// The window, type 2.
    pub mw: &'a Mw,
    /// Its key from now on.
    pub rkey: u32,
    /// The region that it shows.
    pub mr: &'a Mr,
    /// Where it begins in the region, bytes.
    pub offset: usize,
    /// Its length in bytes.
    pub len: usize,
    /// IBV_ACCESS flags.
    pub access: u32,
}

/// A send work request.
#[derive(Clone, Debug, Default)]
pub struct SendWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Local memory.
    pub sges: Vec<Sge>,
    /// `IBV_WR_*`.
    pub opcode: u32,
    /// `IBV_SEND_*`.
    pub flags: u32,
    /// Immediate data (host order), or the key to invalidate.
    pub imm: u32,
    /// Address on the other side.
    pub remote_addr: u64,
    /// Key on the other side.
    pub rkey: u32,
    /// Compare value, or the number to add.
    pub compare_add: u64,
    /// Swap value.
    pub swap: u64,
}

/// A post that was refused.
#[derive(Debug)]
pub struct PostError {
    /// The errno.
    pub error: io::Error,
    /// How many work requests of the list were taken before.
    pub taken: usize,
}

impl std::fmt::Display for PostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "post refused after {}: {}", self.taken, self.error)
    }
}

/// Work requests in the library's form.
pub struct Prepared {
    list: Vec<ffi::ibv_send_wr>,
    sges: Vec<Vec<ffi::ibv_sge>>,
}

// SAFETY: the pointers in it are set anew by each post.
unsafe impl Send for Prepared {}

impl Prepared {
    /// Brings `wrs` into the library's form.
    pub fn new(wrs: &[SendWr]) -> Self {
        let mut sges: Vec<Vec<ffi::ibv_sge>> = Vec::with_capacity(wrs.len());
        let mut list: Vec<ffi::ibv_send_wr> = Vec::with_capacity(wrs.len());
        for wr in wrs {
            assert!(
                wr.flags & IBV_SEND_INLINE == 0 || wr.sges.iter().all(|s| s.mapped),
                "inline data comes from Mr::sge"
            );
            sges.push(raw_sges(&wr.sges));
            let mut raw = ffi::ibv_send_wr {
                wr_id: wr.wr_id,
                num_sge: i32::try_from(wr.sges.len()).unwrap_or(i32::MAX),
                opcode: wr.opcode,
                send_flags: wr.flags,
                ..ffi::ibv_send_wr::default()
            };
            if wr.opcode == IBV_WR_SEND_WITH_INV || wr.opcode == IBV_WR_LOCAL_INV {
                raw.__bindgen_anon_1.invalidate_rkey = wr.imm;
            } else {
                raw.__bindgen_anon_1.imm_data = wr.imm.to_be();
            }
            match wr.opcode {
                IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                    raw.wr.atomic.remote_addr = wr.remote_addr;
                    raw.wr.atomic.compare_add = wr.compare_add;
                    raw.wr.atomic.swap = wr.swap;
                    raw.wr.atomic.rkey = wr.rkey;
                }
                _ => {
                    raw.wr.rdma.remote_addr = wr.remote_addr;
                    raw.wr.rdma.rkey = wr.rkey;
                }
            }
            list.push(raw);
        }
        Prepared { list, sges }
    }

    /// Sets the wr_id of request `index`.
    pub fn set_wr_id(&mut self, index: usize, wr_id: u64) {
        self.list[index].wr_id = wr_id;
    }
}

/// A queue pair.
pub struct Qp {
    raw: *mut ffi::ibv_qp,
    /// The QP number.
    pub number: u32,
    /// Queue sizes as made.
    pub cap: QpCap,
    /// The protection domain.
    pub pd: Arc<Pd>,
    /// For completions of sends.
    pub send_cq: Arc<Cq>,
    /// For completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Where receives come from.
    pub srq: Option<Arc<Srq>>,
}

// SAFETY: verbs calls are thread-safe.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// For `dv`.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_qp {
        self.raw
    }

    /// ibv_modify_qp with the attributes that `mask` names.
    pub fn modify(&self, attr: &QpAttr, mask: u32) -> io::Result<()> {
        let mut attr = *attr;
        // SAFETY: one structure, read during the call.
        errno(unsafe { ffi::ibv_modify_qp(self.raw, &mut attr, mask as i32) })
    }

    /// Changes the state alone.
    pub fn set_state(&self, state: u32) -> io::Result<()> {
        self.modify(&QpAttr { qp_state: state, ..QpAttr::default() }, IBV_QP_STATE)
    }

    /// Queries the attributes that `mask` names.
    pub fn query(&self, mask: u32) -> io::Result<(QpAttr, QpCap)> {
        let mut attr = QpAttr::default();
        let mut init = ffi::ibv_qp_init_attr::default();
        // SAFETY: the library fills both structures.
        errno(unsafe { ffi::ibv_query_qp(self.raw, &mut attr, mask as i32, &mut init) })?;
        Ok((attr, init.cap))
    }

    /// The state as the kernel knows it.
    pub fn state(&self) -> io::Result<u32> {
        Ok(self.query(IBV_QP_STATE)?.0.qp_state)
    }

    /// ibv_query_qp_data_in_order for an opcode.
    pub fn data_in_order(&self, opcode: u32) -> bool {
        // SAFETY: the QP is valid.
        unsafe { ffi::ibv_query_qp_data_in_order(self.raw, opcode, 0) == 1 }
    }

    /// The errno of ibv_set_ece; 0 when it worked.
    pub fn try_set_ece(&self, vendor_id: u32, options: u32) -> i32 {
        let mut ece = ffi::ibv_ece { vendor_id, options, comp_mask: 0 };
        // SAFETY: one structure, read during the call.
        unsafe { ffi::ibv_set_ece(self.raw, &mut ece) }.abs()
    }

    /// Posts a list of sends in one call.
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.post_prepared(&mut Prepared::new(wrs))
    }

    /// Posts a list that was made before; it can be posted again and again.
    pub fn post_prepared(&self, prepared: &mut Prepared) -> Result<(), PostError> {
        // SAFETY: `Prepared::new` made an SGE list for each WR; both stay where they are during
        // the call, and inline data lies in mapped memory.
        unsafe { self.post_raw(&mut prepared.list, &mut prepared.sges) }
    }

    /// # Safety
    /// `sges` has an entry for each of `list`; inline WRs name readable memory.
    unsafe fn post_raw(
        &self,
        list: &mut [ffi::ibv_send_wr],
        sges: &mut [Vec<ffi::ibv_sge>],
    ) -> Result<(), PostError> {
        let count = list.len();
        if count == 0 {
            return Ok(());
        }
        let first = list.as_mut_ptr();
        for (i, s) in sges.iter_mut().enumerate() {
            // SAFETY: i < count: one entry of sges for each of list.
            unsafe {
                let wr = first.add(i);
                (*wr).sg_list = s.as_mut_ptr();
                (*wr).next = if i + 1 < count { first.add(i + 1) } else { std::ptr::null_mut() };
            }
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: a linked list of complete WRs.
        let result = unsafe { ffi::ibv_post_send(self.raw, first, &mut bad) };
        errno(result).map_err(|error| PostError {
            error,
            taken: if bad.is_null() {
                0
            } else {
                (bad as usize).wrapping_sub(first as usize) / size_of::<ffi::ibv_send_wr>()
            },
        })
    }

    /// Posts a signaled request that binds a type 2 window.
    pub fn post_bind(&self, wr_id: u64, bind: &Bind<'_>) -> Result<(), PostError> {
        let mut wr = ffi::ibv_send_wr {
            wr_id,
            opcode: IBV_WR_BIND_MW,
            send_flags: IBV_SEND_SIGNALED,
            ..ffi::ibv_send_wr::default()
        };
        wr.__bindgen_anon_2.bind_mw.mw = bind.mw.raw;
        wr.__bindgen_anon_2.bind_mw.rkey = bind.rkey;
        wr.__bindgen_anon_2.bind_mw.bind_info = ffi::ibv_mw_bind_info {
            mr: bind.mr.raw,
            addr: bind.mr.addr(bind.offset),
            length: bind.len as u64,
            mw_access_flags: bind.access,
        };
        let mut list = [wr];
        // SAFETY: one WR without SGEs; window and MR are valid.
        unsafe { self.post_raw(&mut list, &mut [Vec::new()]) }
    }

    /// Posts one receive.
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> io::Result<()> {
        let (mut wr, _keep) = recv_wr(wr_id, sges);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the WR and its SGEs live during the call.
        errno(unsafe { ffi::ibv_post_recv(self.raw, &mut wr, &mut bad) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the only owner goes.
        unsafe { ffi::ibv_destroy_qp(self.raw) };
    }
}

/// Immediate data of a completion, host order.
pub fn wc_imm(wc: &Wc) -> u32 {
    // SAFETY: a union of two 32-bit integers.
    u32::from_be(unsafe { wc.__bindgen_anon_1.imm_data })
}

/// The key that the peer invalidated.
pub fn wc_invalidated(wc: &Wc) -> u32 {
    // SAFETY: a union of two 32-bit integers.
    unsafe { wc.__bindgen_anon_1.invalidated_rkey }
}

/// Attributes that a connection needs.
#[derive(Clone, Copy, Debug)]
pub struct Connect {
    /// The peer's QP number.
    pub qpn: u32,
    /// The peer's GID.
    pub gid: [u8; 16],
    /// Own GID index.
    pub gid_index: u8,
    /// First PSN of the peer.
    pub rq_psn: u32,
    /// Own first PSN.
    pub sq_psn: u32,
    /// `IBV_MTU_*`.
    pub mtu: u32,
    /// READs and atomics that this side may have in flight.
    pub rd_atomic: u8,
    /// READs and atomics that the peer may have in flight.
    pub dest_rd_atomic: u8,
    /// ACK timeout, 4.096 µs << n.
    pub timeout: u8,
    /// Retries.
    pub retry_cnt: u8,
    /// RNR retries, 7 is without end.
    pub rnr_retry: u8,
    /// RNR timer that this side asks of the peer.
    pub min_rnr_timer: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

impl Connect {
    /// To the QP `qpn` of the same device, whose GID has the index `gid.0`: attributes that do for
    /// requests of any kind, RNR retries without end.
    pub fn to_own(qpn: u32, gid: (u32, [u8; 16]), mtu: u32) -> Self {
        Connect {
            qpn,
            gid: gid.1,
            gid_index: gid.0 as u8,
            rq_psn: 7,
            sq_psn: 7,
            mtu,
            rd_atomic: 4,
            dest_rd_atomic: 4,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            traffic_class: 0,
        }
    }
}

impl Qp {
    /// RESET to INIT with the remote access flags `access`.
    pub fn init(&self, access: u32) -> io::Result<()> {
        let attr = QpAttr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 0,
            port_num: 1,
            qp_access_flags: access,
            ..QpAttr::default()
        };
        self.modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
    }

    /// The attributes and mask of INIT to RTR.
    pub fn rtr_attr(c: &Connect) -> (QpAttr, u32) {
        let mut attr = QpAttr {
            qp_state: IBV_QPS_RTR,
            path_mtu: c.mtu,
            dest_qp_num: c.qpn,
            rq_psn: c.rq_psn,
            max_dest_rd_atomic: c.dest_rd_atomic,
            min_rnr_timer: c.min_rnr_timer,
            ..QpAttr::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid.raw = c.gid;
        attr.ah_attr.grh.sgid_index = c.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.traffic_class = c.traffic_class;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        (attr, mask)
    }

    /// The attributes and mask of RTR to RTS.
    pub fn rts_attr(c: &Connect) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: IBV_QPS_RTS,
            timeout: c.timeout,
            retry_cnt: c.retry_cnt,
            rnr_retry: c.rnr_retry,
            sq_psn: c.sq_psn,
            max_rd_atomic: c.rd_atomic,
            ..QpAttr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        (attr, mask)
    }

    /// INIT to RTR.
    pub fn to_rtr(&self, c: &Connect) -> io::Result<()> {
        let (attr, mask) = Self::rtr_attr(c);
        self.modify(&attr, mask)
    }

    /// RTR to RTS.
    pub fn to_rts(&self, c: &Connect) -> io::Result<()> {
        let (attr, mask) = Self::rts_attr(c);
        self.modify(&attr, mask)
    }
}
