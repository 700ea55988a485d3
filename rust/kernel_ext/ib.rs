// SPDX-License-Identifier: GPL-2.0

//! RDMA devices of one's own: a driver implements [`Operations`] and registers a device.
//!
//! Each object that the RDMA core allocates (`ib_qp`, `ib_cq` …) has the C struct at offset
//! 0 and the driver's value behind it; the driver never sees the C struct. What softirq
//! needs to reach the object, to raise an event, is a [`Back`]: it is taken away under its
//! lock before the destroy callback runs, so that no handler is called once a destroy
//! callback has begun.
//!
//! C header: `include/rdma/ib_verbs.h`.

use super::{
    ib_attr::*,
    ib_dv::{Arguments, Method},
    ib_planes::Change,
    net::{NetDev, NetId},
    restrack::Details,
};
use crate::{bindings, queue::Memory};
use ::core::{
    fmt::{self, Write},
    marker::PhantomData,
    mem::{size_of, MaybeUninit},
    ptr::{self, NonNull},
};
use ::kernel::{
    error::{from_result, to_result},
    ffi::c_int,
    new_spinlock,
    prelude::*,
    str::NullTerminatedFormatter,
    sync::{Arc, SpinLock},
    transmute::{AsBytes, FromBytes},
    types::Opaque,
};

use super::bh;

/// The only port of a device.
pub const PORT: u32 = 1;

/// What a driver provides. The implementing type is the device's data; it is dropped when
/// the device has gone (`dealloc_driver`): after all objects, in process context.
pub trait Operations: Send + Sync + Sized + 'static {
    /// Driver id, see the provider's match.
    const DRIVER_ID: u32;
    /// Highest version of the driver's own ABI.
    const ABI_VERSION: u32;
    /// What `node_desc` says.
    const DESCRIPTION: &'static [u8];

    /// Value behind an `ib_ucontext`.
    type Context: Send + Sync;
    /// Value behind an `ib_pd`.
    type Pd: Send + Sync;
    /// Value behind an `ib_mr`; dropping it deregisters.
    type Mr: Send + Sync;
    /// Value behind an `ib_cq`.
    type Cq: Send + Sync;
    /// Value behind an `ib_qp`.
    type Qp: Send + Sync;
    /// Value behind an `ib_srq`.
    type Srq: Send + Sync;

    /// The module that the callbacks belong to.
    fn module() -> &'static ThisModule;

    /// Whether it still has the netdev that it was made over: it has neither gone nor moved to
    /// another namespace.
    fn has_netdev(&self) -> bool;
    /// Device attributes.
    fn query_device(&self) -> DeviceAttr;
    /// Port attributes.
    fn query_port(&self) -> PortAttr;

    /// Opens a context.
    fn alloc_context(&self, udata: &Udata<'_>) -> Result<Self::Context>;
    /// Makes a protection domain.
    fn alloc_pd(&self, udata: &Udata<'_>) -> Result<Self::Pd>;

    /// Registers memory of the calling process.
    fn reg_mr(&self, device: &RawDevice, pd: &Self::Pd, mr: &MrAttr) -> Result<Self::Mr>;
    /// Registers anew what `old` covers, as `mr` says (`flags` tells what is new). The old
    /// region stays until the new one has taken its place.
    fn rereg_mr(
        &self,
        device: &RawDevice,
        old: &Self::Mr,
        pd: &Self::Pd,
        flags: MrRereg,
        mr: &MrAttr,
    ) -> Result<Self::Mr>;
    /// Key of a region.
    fn mr_key(mr: &Self::Mr) -> u32;

    /// Makes a CQ of at least `entries`; returns it and what it can hold.
    fn create_cq(
        &self,
        back: Arc<Back<bindings::ib_cq>>,
        entries: u32,
        udata: &Udata<'_>,
    ) -> Result<(Self::Cq, u32)>;
    /// Resizes; returns what it can hold now.
    fn resize_cq(&self, cq: &Self::Cq, entries: u32, udata: &Udata<'_>) -> Result<u32>;

    /// Makes an SRQ; `attr` is updated to what was made.
    fn create_srq(
        &self,
        pd: &Self::Pd,
        back: Arc<Back<bindings::ib_srq>>,
        attr: &mut SrqAttr,
        udata: &Udata<'_>,
    ) -> Result<Self::Srq>;
    /// Changes the limit.
    fn modify_srq(&self, srq: &Self::Srq, limit: u32) -> Result;
    /// What it is.
    fn query_srq(&self, srq: &Self::Srq) -> SrqAttr;

    /// Makes an RC QP; `init.cap` is updated to what was made. Returns it and its number.
    fn create_qp(
        &self,
        back: Arc<Back<bindings::ib_qp>>,
        init: &mut QpInit<'_, Self>,
        udata: &Udata<'_>,
    ) -> Result<(Self::Qp, u32)>;
    /// Changes state or attributes; `mask` says which fields of `attr` count.
    fn modify_qp(&self, qp: &Self::Qp, attr: &QpAttr, mask: u32) -> Result;
    /// What it is.
    fn query_qp(&self, qp: &Self::Qp) -> (QpAttr, QpCap, bool);
    /// Last use: afterwards nothing of it is reached from softirq.
    fn destroy_qp(&self, qp: &Self::Qp);
    /// The send doorbell.
    fn doorbell(&self, qp: &Self::Qp) -> Result;
    /// A method of the driver's own.
    fn extension(&self, qp: &Self::Qp, method: Method, arguments: &Arguments<'_>) -> Result;

    /// Changes the device's planes as `text`, written into a file of it, says.
    fn change_planes(&self, change: Change, text: &[u8]) -> Result;
    /// What is read of the device's planes.
    fn show_planes(&self, out: &mut dyn Write) -> fmt::Result;
    /// Takes the controller that `text`, written into a file of the device, names.
    fn choose_controller(&self, text: &[u8]) -> Result;
    /// What is read of the device's controllers.
    fn show_controller(&self, out: &mut dyn Write) -> fmt::Result;

    /// Adds to what the core shows of a QP.
    fn show_qp(&self, qp: &Self::Qp, out: &mut Details<'_>) -> Result;
    /// Adds to what the core shows of a CQ.
    fn show_cq(&self, cq: &Self::Cq, out: &mut Details<'_>) -> Result;
    /// Adds to what the core shows of an SRQ.
    fn show_srq(&self, srq: &Self::Srq, out: &mut Details<'_>) -> Result;
    /// Adds to what the core shows of a region.
    fn show_mr(&self, mr: &Self::Mr, out: &mut Details<'_>) -> Result;

    /// Names of the port's counters, the same for the device's life.
    fn counters(&self) -> &'static [StatDesc];
    /// Their values now.
    fn read_counters(&self, values: &mut [u64]);
}

/// A counter's name, zero-terminated.
#[repr(transparent)]
pub struct StatDesc(bindings::rdma_stat_desc);

// SAFETY: the name is static and never changes.
unsafe impl Sync for StatDesc {}
// SAFETY: as above.
unsafe impl Send for StatDesc {}

impl StatDesc {
    /// A counter called `name`.
    pub const fn new(name: &'static CStr) -> Self {
        Self(bindings::rdma_stat_desc {
            name: ::kernel::str::as_char_ptr_in_const_context(name),
            flags: 0,
            priv_: ptr::null(),
        })
    }
}

/// An RDMA device, seen from outside its driver.
#[repr(transparent)]
pub struct RawDevice(Opaque<bindings::ib_device>);

impl RawDevice {
    /// The C object.
    pub fn as_ptr(&self) -> *mut bindings::ib_device {
        self.0.get()
    }
}

/// A device and its driver's data.
#[repr(C)]
struct Device<T> {
    raw: RawDevice,
    data: MaybeUninit<T>,
    back: MaybeUninit<Arc<Back<bindings::ib_device>>>,
}

impl<T> Device<T> {
    /// # Safety
    ///
    /// `raw` is a device made by [`add_link`] for this `T`, and alive.
    unsafe fn of<'a>(raw: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: the C struct is at offset 0.
        unsafe { &*raw.cast::<Self>() }
    }

    fn data(&self) -> &T {
        // SAFETY: written before the ops are set, dropped in the last callback.
        unsafe { self.data.assume_init_ref() }
    }
}

/// An object of the RDMA core with the driver's value behind it.
#[repr(C)]
struct Shell<C, V> {
    raw: Opaque<C>,
    value: MaybeUninit<V>,
}

impl<C, V> Shell<C, V> {
    /// # Safety
    ///
    /// `raw` is an object made with this shell's size whose value is alive.
    unsafe fn value<'a>(raw: *mut C) -> &'a V {
        // SAFETY: the C struct is at offset 0; the value is alive.
        unsafe { (*raw.cast::<Self>()).value.assume_init_ref() }
    }

    /// # Safety
    ///
    /// `raw` is an object made with this shell's size that has no value yet.
    unsafe fn set(raw: *mut C, value: V) {
        // SAFETY: the memory is there and holds no value.
        unsafe { (*raw.cast::<Self>()).value.write(value) };
    }

    /// # Safety
    ///
    /// `raw` is an object whose value is alive and is not used again.
    unsafe fn drop_value(raw: *mut C) {
        // SAFETY: guaranteed by the caller.
        unsafe { (*raw.cast::<Self>()).value.assume_init_drop() };
    }
}

/// The way from what softirq holds back to the object of the RDMA core.
#[pin_data]
pub struct Back<C> {
    #[pin]
    raw: SpinLock<*mut C>,
}

// SAFETY: the pointer is only used under the lock, and its object may be used on any CPU.
unsafe impl<C> Send for Back<C> {}
// SAFETY: as above.
unsafe impl<C> Sync for Back<C> {}

impl<C> Back<C> {
    /// Leads to `raw`, which must outlive the next [`Back::cut`].
    fn new(raw: *mut C) -> Result<Arc<Self>> {
        Arc::pin_init(pin_init!(Self { raw <- new_spinlock!(raw) }), GFP_KERNEL)
    }

    /// Leads nowhere from now on; a handler that runs has ended.
    fn cut(&self) {
        let _bh = bh::disable();
        *self.raw.lock() = ptr::null_mut();
    }
}

impl Back<bindings::ib_device> {
    /// Holds the device, when it is registered and not going.
    fn hold(&self) -> Option<Held> {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        // SAFETY: the device lives while the lock is held: its end begins with `cut`.
        let held = !raw.is_null() && unsafe { bindings::metaroce_ib_device_try_get(*raw) };
        // Not `then_some`: a `Held` that is made only to be dropped would put the device.
        held.then(|| Held(*raw))
    }

    /// The netdev below the port, unless it is going. Process context.
    pub fn netdev(&self) -> Option<NetDev> {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        if raw.is_null() {
            return None;
        }
        // SAFETY: as in `hold`; what is returned is held, by us after the copy.
        unsafe {
            let netdev = NonNull::new(bindings::metaroce_ib_netdev(*raw, PORT))?;
            let ours = NetDev::get(netdev);
            bindings::metaroce_dev_put(netdev.as_ptr());
            Some(ours)
        }
    }

    /// Begins to remove the device (a work item does it). May be called under RTNL.
    pub fn unregister(&self) {
        if let Some(held) = self.hold() {
            // SAFETY: registered and held.
            unsafe { bindings::ib_unregister_device_queued(held.0) };
        }
    }

    /// Tells programs when the port's state has changed (the core does it by itself, but not
    /// for bonds and their members).
    pub fn port_state_changed(&self) {
        if let Some(held) = self.hold() {
            // SAFETY: the device is held, the netdev until it is put; NULL is none.
            unsafe {
                let netdev = bindings::ib_device_get_netdev(held.0, PORT);
                if !netdev.is_null() {
                    bindings::ib_dispatch_port_state_event(held.0, netdev);
                }
                bindings::metaroce_dev_put(netdev);
            }
        }
    }
}

/// A device that is not unregistered meanwhile.
struct Held(*mut bindings::ib_device);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: held by `Back::hold`.
        unsafe { bindings::ib_device_put(self.0) };
    }
}

impl Back<bindings::ib_cq> {
    /// Tells the program that there is a completion. Outside all locks of the driver.
    pub fn complete(&self) {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        let cq = *raw;
        if cq.is_null() {
            return;
        }
        // SAFETY: the CQ lives while the lock is held: its destruction begins with `cut`.
        unsafe {
            if let Some(handler) = (*cq).comp_handler {
                handler(cq, (*cq).cq_context);
            }
        }
    }

    /// Raises IB_EVENT_CQ_ERR. Outside all locks of the driver.
    pub fn error(&self) {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        let cq = *raw;
        if cq.is_null() {
            return;
        }
        // SAFETY: as in `complete`.
        unsafe {
            let mut event = bindings::ib_event {
                device: (*cq).device,
                element: bindings::ib_event__bindgen_ty_1 { cq },
                event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
            };
            if let Some(handler) = (*cq).event_handler {
                handler(&mut event, (*cq).cq_context);
            }
        }
    }
}

impl Back<bindings::ib_qp> {
    /// Raises an event of a QP. Outside all locks of the driver.
    pub fn event(&self, event: QpEvent) {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        let qp = *raw;
        if qp.is_null() {
            return;
        }
        // SAFETY: the QP lives while the lock is held: its destruction begins with `cut`.
        unsafe {
            let mut event = bindings::ib_event {
                device: (*qp).device,
                element: bindings::ib_event__bindgen_ty_1 { qp },
                event: event as bindings::ib_event_type,
            };
            if let Some(handler) = (*qp).event_handler {
                handler(&mut event, (*qp).qp_context);
            }
        }
    }
}

impl Back<bindings::ib_srq> {
    /// Raises IB_EVENT_SRQ_LIMIT_REACHED. Outside all locks of the driver.
    pub fn limit_reached(&self) {
        let _bh = bh::disable();
        let raw = self.raw.lock();
        let srq = *raw;
        if srq.is_null() {
            return;
        }
        // SAFETY: the SRQ lives while the lock is held: its destruction begins with `cut`.
        unsafe {
            let mut event = bindings::ib_event {
                device: (*srq).device,
                element: bindings::ib_event__bindgen_ty_1 { srq },
                event: bindings::ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED,
            };
            if let Some(handler) = (*srq).event_handler {
                handler(&mut event, (*srq).srq_context);
            }
        }
    }
}

/// A command's request and response structs.
pub struct Udata<'a> {
    raw: *mut bindings::ib_udata,
    context: *mut bindings::ib_ucontext,
    _life: PhantomData<&'a ()>,
}

impl Udata<'_> {
    /// # Safety
    ///
    /// `raw` is null or the udata of the command that runs.
    unsafe fn new(raw: *mut bindings::ib_udata) -> Self {
        let context = if raw.is_null() {
            ptr::null_mut()
        } else {
            // SAFETY: the udata of a command lies in its attribute bundle.
            unsafe { bindings::metaroce_udata_context(raw) }
        };
        Self {
            raw,
            context,
            _life: PhantomData,
        }
    }

    /// The request; a shorter one is filled up with zeros, a longer one must be zero
    /// beyond. `EOPNOTSUPP` when it is not, `EINVAL` when shorter than `min` bytes.
    pub fn request<R: FromBytes + Default>(&self, min: usize) -> Result<R> {
        if self.raw.is_null() {
            return Err(EINVAL);
        }
        let mut request = R::default();
        // SAFETY: `request` has room for its size; any bytes make a value of it.
        to_result(unsafe {
            bindings::_ib_copy_validate_udata_in(
                self.raw,
                (&raw mut request).cast(),
                size_of::<R>(),
                min,
            )
        })?;
        Ok(request)
    }

    /// Sees to it that there is no request.
    pub fn no_request(&self) -> Result {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: the udata is that of the command that runs.
        to_result(unsafe { bindings::metaroce_udata_in_empty(self.raw) })
    }

    /// Hands the response to the program: cut short or filled up with zeros as it asked.
    pub fn respond<R: AsBytes>(&self, response: &R) -> Result {
        if self.raw.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: the response's bytes are all initialised.
        to_result(unsafe {
            bindings::_ib_respond_udata(self.raw, ptr::from_ref(response).cast(), size_of::<R>())
        })
    }

    /// No request, no response.
    pub fn none(&self) -> Result {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: the udata is that of the command that runs.
        to_result(unsafe { bindings::metaroce_udata_none(self.raw) })
    }

    /// Lets the program map `memory`.
    pub fn map(&self, memory: &Arc<Memory>) -> Result<Mapping> {
        let context = NonNull::new(self.context).ok_or(EINVAL)?;
        let size = memory.size();
        let entry = KBox::new(
            MapEntry {
                raw: Opaque::zeroed(),
                memory: memory.clone(),
            },
            GFP_KERNEL_ACCOUNT,
        )?;
        let entry = KBox::into_raw(entry);
        // SAFETY: the context is the command's; the entry is zeroed and stays until
        // `mmap_free` is called for it.
        let r = unsafe {
            bindings::rdma_user_mmap_entry_insert(context.as_ptr(), (*entry).raw.get(), size)
        };
        if let Err(e) = to_result(r) {
            // SAFETY: it was not inserted.
            drop(unsafe { KBox::from_raw(entry) });
            return Err(e);
        }
        Ok(Mapping {
            // SAFETY: from a box.
            entry: unsafe { NonNull::new_unchecked(entry) },
            size,
        })
    }
}

/// Entry of a context's table of what can be mapped.
#[repr(C)]
struct MapEntry {
    raw: Opaque<bindings::rdma_user_mmap_entry>,
    memory: Arc<Memory>,
}

/// Keeps memory mappable; dropped, no further mapping of it is made (existing ones stay).
/// Process context.
pub struct Mapping {
    entry: NonNull<MapEntry>,
    size: usize,
}

// SAFETY: the entry has its own reference count and lock.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Where the program maps it from, in bytes.
    pub fn offset(&self) -> u64 {
        // SAFETY: the entry lives as long as `self`; the field does not change.
        let pgoff = unsafe { (*self.entry.as_ref().raw.get()).start_pgoff };
        (pgoff as u64) << ::kernel::page::PAGE_SHIFT
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was inserted; the memory goes in `mmap_free` with the last reference.
        unsafe { bindings::rdma_user_mmap_entry_remove(self.entry.as_ref().raw.get()) };
    }
}

/// What a QP is made from.
pub struct QpInit<'a, T: Operations> {
    /// Protection domain.
    pub pd: &'a T::Pd,
    /// Send CQ.
    pub send_cq: &'a T::Cq,
    /// Receive CQ.
    pub recv_cq: &'a T::Cq,
    /// Shared receive queue.
    pub srq: Option<&'a T::Srq>,
    /// Every send is signaled.
    pub signal_all: bool,
    /// What was asked for, and what it has become.
    pub cap: QpCap,
}

/// Whether the RDMA core allows an RC QP to go from one state to another with these
/// attributes.
pub fn transition_allowed(from: u32, to: u32, mask: u32) -> bool {
    // SAFETY: only looks at a table; states are in range (checked by the core).
    unsafe {
        bindings::ib_modify_qp_is_ok(
            from,
            to,
            bindings::ib_qp_type_IB_QPT_RC,
            mask as bindings::ib_qp_attr_mask,
        )
    }
}

/// Makes a device over `netdev` and registers it under `name` (the name is the user's: udev
/// leaves it). `make` builds the driver's data, for a netdev in that namespace: `ENODEV` when it
/// is there no more. On an error nothing is left.
pub fn add_link<T: Operations>(
    netdev: &NetDev,
    name: &CStr,
    guid: u64,
    make: impl FnOnce(Arc<Back<bindings::ib_device>>, NetId) -> Result<T>,
) -> Result {
    let ops = VTable::<T>::ops()?;
    // Held until the device is registered: from then on the core sees to it that the device
    // leaves a namespace that ends.
    let net = netdev.hold_net().ok_or(ENODEV)?;
    // SAFETY: the namespace is held.
    let raw = unsafe { bindings::_ib_alloc_device(size_of::<Device<T>>(), net.id().as_ptr()) };
    if raw.is_null() {
        return Err(ENOMEM);
    }
    let made = Back::new(raw).and_then(|back| {
        let data = make(back.clone(), net.id()).inspect_err(|_| back.cut())?;
        Ok((back, data))
    });
    let (back, data) = match made {
        Ok(made) => made,
        Err(e) => {
            // SAFETY: not registered, no ops set.
            unsafe { bindings::ib_dealloc_device(raw) };
            return Err(e);
        }
    };
    let way_back = back.clone();
    // SAFETY: the device is ours alone until it is registered, and large enough.
    let r = unsafe {
        (*raw.cast::<Device<T>>()).data.write(data);
        (*raw.cast::<Device<T>>()).back.write(back);
        (*raw).node_guid = guid.to_be();
        (*raw).node_type = bindings::RDMA_NODE_IB_CA as u8;
        (*raw).phys_port_cnt = PORT;
        (*raw).num_comp_vectors = bindings::metaroce_online_cpus() as c_int;
        (*raw).uverbs_cmd_mask |= 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SEND;
        for (to, from) in (*raw)
            .node_desc
            .iter_mut()
            .zip(T::DESCRIPTION.iter().take(63))
        {
            *to = *from;
        }
        (*raw).name_assign_type = bindings::rdma_nl_name_assign_type_RDMA_NAME_ASSIGN_TYPE_USER;
        bindings::metaroce_set_definitions(raw);
        // Copies the table; from here on `dealloc_driver` drops the data.
        bindings::ib_set_device_ops(raw, &*ops);
        let mut r = bindings::ib_device_set_netdev(raw, netdev.as_ptr(), PORT);
        if r == 0 {
            r = bindings::ib_register_device(raw, name.as_char_ptr(), ptr::null_mut());
        }
        r
    };
    if let Err(e) = to_result(r) {
        // SAFETY: not registered.
        unsafe { bindings::ib_dealloc_device(raw) };
        return Err(e);
    }
    // The last news of its netdev may have come before there was a device that could go. (It may
    // be gone already, by another thread: then it cannot be held.)
    if let Some(held) = way_back.hold() {
        // SAFETY: registered and held.
        unsafe {
            if !VTable::<T>::device(held.0).has_netdev() {
                bindings::ib_unregister_device_queued(held.0);
                return Err(ENODEV);
            }
        }
    }
    Ok(())
}

/// Whether `netdev` carries a device of this driver.
pub fn has_link<T: Operations>(netdev: &NetDev) -> bool {
    // SAFETY: the netdev is held; a device that is returned is held and put.
    unsafe {
        let raw = bindings::ib_device_get_by_netdev(netdev.as_ptr(), T::DRIVER_ID);
        if raw.is_null() {
            return false;
        }
        bindings::ib_device_put(raw);
    }
    true
}

/// Removes every device of this driver and waits until all of them, also those that
/// somebody else is removing, are gone.
fn remove_all<T: Operations>() {
    // SAFETY: no requirements but process context.
    unsafe { bindings::ib_unregister_driver(T::DRIVER_ID) };
}

::kernel::sync::global_lock! {
    // SAFETY: initialised in `LinkType::new`, before the only user can be called.
    unsafe(uninit) static NEW_LINK: Mutex<()> = ();
}

/// `rdma link add … type NAME`.
pub trait Link: Operations {
    /// The type's name.
    const TYPE: &'static CStr;

    /// Makes a device called `name` over `netdev`.
    fn new_link(name: &CStr, netdev: &NetDev) -> Result;
}

/// A link type, registered with the core for as long as this lives. Dropping it removes all
/// devices of the driver.
#[pin_data(PinnedDrop)]
pub struct LinkType<T: Link> {
    #[pin]
    ops: Opaque<bindings::rdma_link_ops>,
    _driver: PhantomData<fn() -> T>,
}

// SAFETY: only touched by the core, under its own lock.
unsafe impl<T: Link> Send for LinkType<T> {}
// SAFETY: as above.
unsafe impl<T: Link> Sync for LinkType<T> {}

impl<T: Link> LinkType<T> {
    /// Registers the type.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            ops <- Opaque::ffi_init(|slot: *mut bindings::rdma_link_ops| {
                // SAFETY: `slot` is pinned and stays until `drop`, which unregisters it. A
                // module has one link type, so the lock is initialised once.
                unsafe {
                    NEW_LINK.init();
                    slot.write(bindings::rdma_link_ops::default());
                    (*slot).type_ = T::TYPE.as_char_ptr();
                    (*slot).newlink = Some(new_link_callback::<T>);
                    (*slot).dellink = Some(del_link_callback);
                    bindings::rdma_link_register(slot);
                }
            }),
            _driver: PhantomData,
        })
    }
}

#[pinned_drop]
impl<T: Link> PinnedDrop for LinkType<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: registered in `new`. Waits for calls that are running.
        unsafe { bindings::rdma_link_unregister(self.ops.get()) };
        // Now that no device can be made, the old ones.
        remove_all::<T>();
    }
}

/// # Safety
///
/// Only called by the core, with a zero-terminated name and a netdev that it holds.
unsafe extern "C" fn new_link_callback<T: Link>(
    name: *const ::kernel::ffi::c_char,
    netdev: *mut bindings::net_device,
) -> c_int {
    from_result(|| {
        let netdev = NonNull::new(netdev).ok_or(EINVAL)?;
        // SAFETY: the core holds the netdev during the call.
        let netdev = unsafe { NetDev::get(netdev) };
        // SAFETY: the core passes a zero-terminated name.
        let name = unsafe { CStr::from_char_ptr(name.cast()) };
        // One at a time: whether a netdev is in use is looked up and then relied on.
        let _serial = NEW_LINK.lock();
        T::new_link(name, &netdev)?;
        Ok(0)
    })
}

/// The core unregisters the device afterwards.
///
/// # Safety
///
/// Touches nothing.
unsafe extern "C" fn del_link_callback(_raw: *mut bindings::ib_device) -> c_int {
    0
}

/// A QP, and the data of its device.
///
/// # Safety
///
/// `raw` is a QP of a device of `T`, and alive.
pub(super) unsafe fn qp_of<'a, T: Operations>(raw: *mut bindings::ib_qp) -> (&'a T, &'a T::Qp) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        (
            VTable::<T>::device((*raw).device),
            &QpShell::<T>::value(raw).0,
        )
    }
}

/// The data of a device.
///
/// # Safety
///
/// `raw` is a device of `T`, and alive.
pub(super) unsafe fn device_of<'a, T: Operations>(raw: *mut bindings::ib_device) -> &'a T {
    // SAFETY: guaranteed by the caller.
    unsafe { VTable::<T>::device(raw) }
}

/// The table of callbacks.
struct VTable<T>(PhantomData<T>);

type ContextShell<T> = Shell<bindings::ib_ucontext, <T as Operations>::Context>;
type PdShell<T> = Shell<bindings::ib_pd, <T as Operations>::Pd>;
type MrShell<T> = Shell<bindings::ib_mr, <T as Operations>::Mr>;
type CqShell<T> = Shell<bindings::ib_cq, (<T as Operations>::Cq, Arc<Back<bindings::ib_cq>>)>;
type QpShell<T> = Shell<bindings::ib_qp, (<T as Operations>::Qp, Arc<Back<bindings::ib_qp>>)>;
type SrqShell<T> = Shell<bindings::ib_srq, (<T as Operations>::Srq, Arc<Back<bindings::ib_srq>>)>;

/// An operation of the table that only says how it went.
fn errno(r: Result) -> c_int {
    match r {
        Ok(()) => 0,
        Err(e) => e.to_errno(),
    }
}

// In all callbacks: the core passes objects of a device that was registered with this table,
// so that they are shells of `T`'s values, alive for the length of the call.
#[expect(
    clippy::missing_safety_doc,
    reason = "callbacks of the RDMA core: the comment above is the contract of all of them"
)]
impl<T: Operations> VTable<T> {
    fn ops() -> Result<KBox<bindings::ib_device_ops>> {
        let mut ops = KBox::new(bindings::ib_device_ops::default(), GFP_KERNEL)?;
        ops.owner = T::module().as_ptr().cast();
        ops.driver_id = T::DRIVER_ID;
        ops.uverbs_abi_ver = T::ABI_VERSION;
        ops.set_uverbs_robust_udata(1);

        ops.query_device = Some(Self::query_device);
        ops.query_port = Some(Self::query_port);
        ops.query_pkey = Some(Self::query_pkey);
        ops.get_port_immutable = Some(Self::port_immutable);
        ops.get_link_layer = Some(Self::link_layer);
        ops.get_netdev = Some(Self::get_netdev);
        ops.add_gid = Some(Self::add_gid);
        ops.del_gid = Some(Self::del_gid);
        ops.dealloc_driver = Some(Self::dealloc);
        ops.get_dev_fw_str = Some(Self::fw_str);

        ops.alloc_ucontext = Some(Self::alloc_context);
        ops.dealloc_ucontext = Some(Self::dealloc_context);
        ops.disassociate_ucontext = Some(Self::disassociate);
        ops.mmap = Some(Self::mmap);
        ops.mmap_free = Some(Self::mmap_free);

        ops.alloc_pd = Some(Self::alloc_pd);
        ops.dealloc_pd = Some(Self::dealloc_pd);
        ops.reg_user_mr = Some(Self::reg_mr);
        ops.rereg_user_mr = Some(Self::rereg_mr);
        ops.dereg_mr = Some(Self::dereg_mr);

        ops.create_cq = Some(Self::create_cq);
        ops.destroy_cq = Some(Self::destroy_cq);
        ops.resize_user_cq = Some(Self::resize_cq);

        ops.create_srq = Some(Self::create_srq);
        ops.modify_srq = Some(Self::modify_srq);
        ops.query_srq = Some(Self::query_srq);
        ops.destroy_srq = Some(Self::destroy_srq);

        ops.create_qp = Some(Self::create_qp);
        ops.modify_qp = Some(Self::modify_qp);
        ops.query_qp = Some(Self::query_qp);
        ops.destroy_qp = Some(Self::destroy_qp);
        ops.post_send = Some(Self::post_send);

        ops.fill_res_qp_entry = Some(Self::show_qp);
        ops.fill_res_cq_entry = Some(Self::show_cq);
        ops.fill_res_srq_entry = Some(Self::show_srq);
        ops.fill_res_mr_entry = Some(Self::show_mr);

        // SAFETY: only returns a pointer to what is static.
        ops.device_group = unsafe { bindings::metaroce_plane_group() };

        ops.alloc_hw_port_stats = Some(Self::alloc_stats);
        ops.get_hw_stats = Some(Self::get_stats);

        ops.size_ib_ucontext = size_of::<ContextShell<T>>();
        ops.size_ib_pd = size_of::<PdShell<T>>();
        ops.size_ib_cq = size_of::<CqShell<T>>();
        ops.size_ib_qp = size_of::<QpShell<T>>();
        ops.size_ib_srq = size_of::<SrqShell<T>>();
        Ok(ops)
    }

    unsafe fn device<'a>(raw: *mut bindings::ib_device) -> &'a T {
        // SAFETY: see the comment on the `impl`.
        unsafe { Device::<T>::of(raw) }.data()
    }

    unsafe extern "C" fn query_device(
        raw: *mut bindings::ib_device,
        attr: *mut bindings::ib_device_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; `attr` is valid for writing.
        unsafe {
            if let Err(e) = Udata::for_query(udata) {
                return e.to_errno();
            }
            Self::device(raw).query_device().store(&mut *attr);
        }
        0
    }

    unsafe extern "C" fn fw_str(raw: *mut bindings::ib_device, text: *mut ::kernel::ffi::c_char) {
        // SAFETY: see the comment on the `impl`; the core passes a buffer of this size.
        let (version, text) = unsafe {
            (
                Self::device(raw).query_device().fw_ver,
                ::core::slice::from_raw_parts_mut(
                    text.cast::<u8>(),
                    bindings::IB_FW_VERSION_NAME_MAX as usize,
                ),
            )
        };
        if let Some(mut text) = NullTerminatedFormatter::new(text) {
            // Three numbers of at most 16 bits fit into it.
            let _ = write!(
                text,
                "{}.{}.{}",
                version >> 32,
                (version >> 16) & 0xffff,
                version & 0xffff
            );
        }
    }

    unsafe extern "C" fn query_port(
        raw: *mut bindings::ib_device,
        _port: u32,
        attr: *mut bindings::ib_port_attr,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; `attr` is valid for writing, zeroed.
        unsafe { Self::device(raw).query_port().store(&mut *attr) };
        0
    }

    unsafe extern "C" fn query_pkey(
        _raw: *mut bindings::ib_device,
        _port: u32,
        index: u16,
        pkey: *mut u16,
    ) -> c_int {
        if index != 0 {
            return EINVAL.to_errno();
        }
        // SAFETY: `pkey` is valid for writing.
        unsafe { *pkey = 0xffff };
        0
    }

    unsafe extern "C" fn port_immutable(
        raw: *mut bindings::ib_device,
        _port: u32,
        out: *mut bindings::ib_port_immutable,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; `out` is valid for writing.
        unsafe {
            let port = Self::device(raw).query_port();
            (*out).pkey_tbl_len = 1;
            (*out).gid_tbl_len = port.gid_tbl_len as c_int;
            (*out).core_cap_flags = bindings::RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
            (*out).max_mad_size = bindings::IB_MGMT_MAD_SIZE;
        }
        0
    }

    unsafe extern "C" fn link_layer(
        _raw: *mut bindings::ib_device,
        _port: u32,
    ) -> bindings::rdma_link_layer {
        bindings::rdma_link_layer_IB_LINK_LAYER_ETHERNET
    }

    /// The netdev by which the core finds the addresses of a device. It looks for those of a
    /// VLAN at the netdev below: a device over a VLAN would have none otherwise.
    unsafe extern "C" fn get_netdev(
        raw: *mut bindings::ib_device,
        port: u32,
    ) -> *mut bindings::net_device {
        // SAFETY: the core asks for valid ports of a device that lives.
        unsafe { bindings::metaroce_ib_real_netdev(raw, port) }
    }

    /// The core keeps the table of GIDs; nothing here depends on it. A device over a VLAN is
    /// offered those of the netdev below as well.
    unsafe extern "C" fn add_gid(
        attr: *const bindings::ib_gid_attr,
        _context: *mut *mut ::kernel::ffi::c_void,
    ) -> c_int {
        // SAFETY: the core's attributes, of a device that lives.
        if unsafe { bindings::metaroce_gid_is_ours(attr) } {
            0
        } else {
            EADDRNOTAVAIL.to_errno()
        }
    }

    unsafe extern "C" fn del_gid(
        _attr: *const bindings::ib_gid_attr,
        _context: *mut *mut ::kernel::ffi::c_void,
    ) -> c_int {
        0
    }

    unsafe extern "C" fn dealloc(raw: *mut bindings::ib_device) {
        // SAFETY: the last callback of the device; its data is alive and not used again.
        unsafe {
            let device = raw.cast::<Device<T>>();
            (*device).back.assume_init_ref().cut();
            (*device).data.assume_init_drop();
            (*device).back.assume_init_drop();
        }
    }

    unsafe extern "C" fn alloc_context(
        raw: *mut bindings::ib_ucontext,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                let device = Self::device((*raw).device);
                let context = device.alloc_context(&Udata::new(udata))?;
                ContextShell::<T>::set(raw, context);
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn dealloc_context(raw: *mut bindings::ib_ucontext) {
        // SAFETY: see the comment on the `impl`; it is the last use.
        unsafe { ContextShell::<T>::drop_value(raw) };
    }

    /// Mappings hold page references of their own and may stay.
    unsafe extern "C" fn disassociate(_raw: *mut bindings::ib_ucontext) {}

    unsafe extern "C" fn mmap(
        raw: *mut bindings::ib_ucontext,
        vma: *mut bindings::vm_area_struct,
    ) -> c_int {
        // SAFETY: the core passes a context of this driver and the VMA being made.
        unsafe {
            if !bindings::metaroce_vma_is_shared(vma) {
                return EINVAL.to_errno();
            }
            // Only finds an entry whose offset and size are exactly those of the VMA.
            let entry = bindings::rdma_user_mmap_entry_get(raw, vma);
            if entry.is_null() {
                return EINVAL.to_errno();
            }
            // Entries are only made by `Udata::map`; the C struct is at offset 0.
            let ours = &*entry.cast::<MapEntry>();
            let memory = &ours.memory;
            let r = bindings::metaroce_ring_map(vma, memory.as_ptr().cast(), memory.size());
            bindings::rdma_user_mmap_entry_put(entry);
            r
        }
    }

    unsafe extern "C" fn mmap_free(entry: *mut bindings::rdma_user_mmap_entry) {
        // SAFETY: the last reference to an entry made by `Udata::map` from a box.
        drop(unsafe { KBox::from_raw(entry.cast::<MapEntry>()) });
    }

    unsafe extern "C" fn alloc_pd(
        raw: *mut bindings::ib_pd,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                let pd = Self::device((*raw).device).alloc_pd(&Udata::new(udata))?;
                PdShell::<T>::set(raw, pd);
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn dealloc_pd(
        raw: *mut bindings::ib_pd,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; it is the last use.
        unsafe { PdShell::<T>::drop_value(raw) };
        0
    }

    /// Puts a region into an `ib_mr` of its own; the core fills the rest in.
    fn box_mr(mr: T::Mr) -> Result<*mut bindings::ib_mr> {
        let key = T::mr_key(&mr);
        // Filled once it is there: without memory for it the region is dropped as it is.
        let mut shell = KBox::new(
            Shell {
                raw: Opaque::new(bindings::ib_mr::default()),
                value: MaybeUninit::uninit(),
            },
            GFP_KERNEL_ACCOUNT,
        )?;
        shell.value.write(mr);
        let raw: *mut bindings::ib_mr = KBox::into_raw(shell).cast();
        // SAFETY: just allocated.
        unsafe {
            (*raw).lkey = key;
            (*raw).rkey = key;
        }
        Ok(raw)
    }

    unsafe extern "C" fn reg_mr(
        pd: *mut bindings::ib_pd,
        start: u64,
        length: u64,
        virt: u64,
        access: c_int,
        dmah: *mut bindings::ib_dmah,
        udata: *mut bindings::ib_udata,
    ) -> *mut bindings::ib_mr {
        // SAFETY: see the comment on the `impl`.
        let r = unsafe {
            (|| {
                if !dmah.is_null() {
                    return Err(EOPNOTSUPP);
                }
                let device = Device::<T>::of((*pd).device);
                Udata::new(udata).none()?;
                let attr = MrAttr {
                    start,
                    length,
                    iova: virt,
                    access: access as u32,
                };
                Self::box_mr(
                    device
                        .data()
                        .reg_mr(&device.raw, PdShell::<T>::value(pd), &attr)?,
                )
            })()
        };
        r.unwrap_or_else(|e: Error| e.to_ptr())
    }

    unsafe extern "C" fn rereg_mr(
        mr: *mut bindings::ib_mr,
        flags: c_int,
        start: u64,
        length: u64,
        virt: u64,
        access: c_int,
        pd: *mut bindings::ib_pd,
        udata: *mut bindings::ib_udata,
    ) -> *mut bindings::ib_mr {
        // SAFETY: see the comment on the `impl`.
        let r = unsafe {
            (|| {
                let device = Device::<T>::of((*pd).device);
                Udata::new(udata).none()?;
                let attr = MrAttr {
                    start,
                    length,
                    iova: virt,
                    access: access as u32,
                };
                let new = device.data().rereg_mr(
                    &device.raw,
                    MrShell::<T>::value(mr),
                    PdShell::<T>::value(pd),
                    MrRereg(flags as u32),
                    &attr,
                )?;
                let raw = Self::box_mr(new)?;
                let translated = MrRereg(flags as u32).translation();
                (*raw).iova = if translated { virt } else { (*mr).iova };
                (*raw).length = if translated { length } else { (*mr).length };
                Ok(raw)
            })()
        };
        r.unwrap_or_else(|e: Error| e.to_ptr())
    }

    unsafe extern "C" fn dereg_mr(
        mr: *mut bindings::ib_mr,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; it is the last use of the `ib_mr`, which
        // is the driver's to free.
        unsafe {
            MrShell::<T>::drop_value(mr);
            drop(KBox::from_raw(mr.cast::<MrShell<T>>()));
        }
        0
    }

    unsafe extern "C" fn create_cq(
        raw: *mut bindings::ib_cq,
        attr: *const bindings::ib_cq_init_attr,
        bundle: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                // Every completion carries a timestamp; an overrun is never ignored.
                let known =
                    bindings::ib_uverbs_ex_create_cq_flags_IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION;
                if bundle.is_null() || (*attr).flags & !known != 0 {
                    return Err(EOPNOTSUPP);
                }
                let udata = Udata::new(bindings::metaroce_bundle_udata(bundle));
                let back = Back::new(raw)?;
                let made = Self::device((*raw).device).create_cq(back.clone(), (*attr).cqe, &udata);
                let (cq, entries) = made.inspect_err(|_| back.cut())?;
                (*raw).cqe = entries as c_int;
                CqShell::<T>::set(raw, (cq, back));
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn destroy_cq(
        raw: *mut bindings::ib_cq,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; it is the last use.
        unsafe {
            CqShell::<T>::value(raw).1.cut();
            CqShell::<T>::drop_value(raw);
        }
        0
    }

    unsafe extern "C" fn resize_cq(
        raw: *mut bindings::ib_cq,
        entries: ::kernel::ffi::c_uint,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                let device = Self::device((*raw).device);
                let (cq, _) = CqShell::<T>::value(raw);
                let entries = device.resize_cq(cq, entries, &Udata::new(udata))?;
                (*raw).cqe = entries as c_int;
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn create_srq(
        raw: *mut bindings::ib_srq,
        init: *mut bindings::ib_srq_init_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                if udata.is_null() || (*init).srq_type != bindings::ib_srq_type_IB_SRQT_BASIC {
                    return Err(EOPNOTSUPP);
                }
                let mut attr = SrqAttr {
                    max_wr: (*init).attr.max_wr,
                    max_sge: (*init).attr.max_sge,
                    limit: (*init).attr.srq_limit,
                };
                let back = Back::new(raw)?;
                let made = Self::device((*raw).device).create_srq(
                    PdShell::<T>::value((*raw).pd),
                    back.clone(),
                    &mut attr,
                    &Udata::new(udata),
                );
                let srq = made.inspect_err(|_| back.cut())?;
                (*init).attr.max_wr = attr.max_wr;
                (*init).attr.max_sge = attr.max_sge;
                SrqShell::<T>::set(raw, (srq, back));
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn modify_srq(
        raw: *mut bindings::ib_srq,
        attr: *mut bindings::ib_srq_attr,
        mask: bindings::ib_srq_attr_mask,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                Udata::new(udata).none()?;
                if mask & !bindings::ib_srq_attr_mask_IB_SRQ_LIMIT != 0 {
                    return Err(EOPNOTSUPP);
                }
                if mask == 0 {
                    return Ok(());
                }
                let device = Self::device((*raw).device);
                device.modify_srq(&SrqShell::<T>::value(raw).0, (*attr).srq_limit)
            })()
        })
    }

    unsafe extern "C" fn query_srq(
        raw: *mut bindings::ib_srq,
        attr: *mut bindings::ib_srq_attr,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; `attr` is valid for writing.
        unsafe {
            let device = Self::device((*raw).device);
            let now = device.query_srq(&SrqShell::<T>::value(raw).0);
            (*attr).max_wr = now.max_wr;
            (*attr).max_sge = now.max_sge;
            (*attr).srq_limit = now.limit;
        }
        0
    }

    unsafe extern "C" fn destroy_srq(
        raw: *mut bindings::ib_srq,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; it is the last use.
        unsafe {
            SrqShell::<T>::value(raw).1.cut();
            SrqShell::<T>::drop_value(raw);
        }
        0
    }

    unsafe extern "C" fn create_qp(
        raw: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_init_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; CQs and SRQ are of the same device.
        errno(unsafe {
            (|| {
                let attr = &mut *attr;
                if udata.is_null()
                    || attr.qp_type != bindings::ib_qp_type_IB_QPT_RC
                    || attr.create_flags != 0
                    || !attr.rwq_ind_tbl.is_null()
                {
                    return Err(EOPNOTSUPP);
                }
                if (*raw).pd.is_null() || attr.send_cq.is_null() || attr.recv_cq.is_null() {
                    return Err(EINVAL);
                }
                let mut init = QpInit::<T> {
                    pd: PdShell::<T>::value((*raw).pd),
                    send_cq: &CqShell::<T>::value(attr.send_cq).0,
                    recv_cq: &CqShell::<T>::value(attr.recv_cq).0,
                    srq: (!attr.srq.is_null()).then(|| &SrqShell::<T>::value(attr.srq).0),
                    signal_all: attr.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
                    cap: QpCap::load(&attr.cap),
                };
                let back = Back::new(raw)?;
                let made = Self::device((*raw).device).create_qp(
                    back.clone(),
                    &mut init,
                    &Udata::new(udata),
                );
                let (qp, number) = made.inspect_err(|_| back.cut())?;
                init.cap.store(&mut attr.cap);
                (*raw).qp_num = number;
                QpShell::<T>::set(raw, (qp, back));
                Ok(())
            })()
        })
    }

    unsafe extern "C" fn modify_qp(
        raw: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        mask: c_int,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        errno(unsafe {
            (|| {
                Udata::new(udata).none()?;
                let mask = mask as u32;
                let attr = QpAttr::load(&*attr, mask);
                Self::device((*raw).device).modify_qp(&QpShell::<T>::value(raw).0, &attr, mask)
            })()
        })
    }

    unsafe extern "C" fn query_qp(
        raw: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        _mask: c_int,
        init: *mut bindings::ib_qp_init_attr,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; `attr` and `init` are valid for writing.
        unsafe {
            let device = Self::device((*raw).device);
            let (now, cap, signal_all) = device.query_qp(&QpShell::<T>::value(raw).0);
            now.store(&mut *attr);
            cap.store(&mut (*attr).cap);
            cap.store(&mut (*init).cap);
            (*init).sq_sig_type = if signal_all {
                bindings::ib_sig_type_IB_SIGNAL_ALL_WR
            } else {
                bindings::ib_sig_type_IB_SIGNAL_REQ_WR
            };
        }
        0
    }

    unsafe extern "C" fn destroy_qp(
        raw: *mut bindings::ib_qp,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; it is the last use.
        unsafe {
            let (qp, back) = QpShell::<T>::value(raw);
            back.cut();
            Self::device((*raw).device).destroy_qp(qp);
            QpShell::<T>::drop_value(raw);
        }
        0
    }

    /// The doorbell: WRs are in the ring, not in the command.
    unsafe extern "C" fn post_send(
        raw: *mut bindings::ib_qp,
        wr: *const bindings::ib_send_wr,
        bad: *mut *const bindings::ib_send_wr,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`.
        unsafe {
            if !wr.is_null() {
                *bad = wr;
                return EOPNOTSUPP.to_errno();
            }
            let device = Self::device((*raw).device);
            errno(device.doorbell(&QpShell::<T>::value(raw).0))
        }
    }

    unsafe extern "C" fn show_qp(msg: *mut bindings::sk_buff, raw: *mut bindings::ib_qp) -> c_int {
        // SAFETY: see the comment on the `impl`; the core is writing the object into `msg`.
        unsafe {
            Details::fill(msg, |out| {
                Self::device((*raw).device).show_qp(&QpShell::<T>::value(raw).0, out)
            })
        }
    }

    unsafe extern "C" fn show_cq(msg: *mut bindings::sk_buff, raw: *mut bindings::ib_cq) -> c_int {
        // SAFETY: see the comment on the `impl`; the core is writing the object into `msg`.
        unsafe {
            Details::fill(msg, |out| {
                Self::device((*raw).device).show_cq(&CqShell::<T>::value(raw).0, out)
            })
        }
    }

    unsafe extern "C" fn show_srq(
        msg: *mut bindings::sk_buff,
        raw: *mut bindings::ib_srq,
    ) -> c_int {
        // SAFETY: see the comment on the `impl`; the core is writing the object into `msg`.
        unsafe {
            Details::fill(msg, |out| {
                Self::device((*raw).device).show_srq(&SrqShell::<T>::value(raw).0, out)
            })
        }
    }

    unsafe extern "C" fn show_mr(msg: *mut bindings::sk_buff, raw: *mut bindings::ib_mr) -> c_int {
        // SAFETY: see the comment on the `impl`; the core is writing the object into `msg`.
        unsafe {
            Details::fill(msg, |out| {
                Self::device((*raw).device).show_mr(MrShell::<T>::value(raw), out)
            })
        }
    }

    unsafe extern "C" fn alloc_stats(
        raw: *mut bindings::ib_device,
        _port: u32,
    ) -> *mut bindings::rdma_hw_stats {
        // SAFETY: see the comment on the `impl`.
        let descs = unsafe { Self::device(raw) }.counters();
        // SAFETY: the descriptions are static; the core frees what is returned.
        unsafe {
            bindings::rdma_alloc_hw_stats_struct(
                descs.as_ptr().cast(),
                descs.len() as c_int,
                bindings::RDMA_HW_STATS_DEFAULT_LIFESPAN as ::kernel::ffi::c_ulong,
            )
        }
    }

    unsafe extern "C" fn get_stats(
        raw: *mut bindings::ib_device,
        stats: *mut bindings::rdma_hw_stats,
        port: u32,
        _index: c_int,
    ) -> c_int {
        if port != PORT {
            return EINVAL.to_errno();
        }
        // SAFETY: see the comment on the `impl`; `stats` was made by `alloc_stats`, with
        // room for `num_counters` values.
        unsafe {
            let count = (*stats).num_counters;
            let values = ::core::slice::from_raw_parts_mut(
                (*stats).value.as_mut_ptr(),
                count.max(0) as usize,
            );
            Self::device(raw).read_counters(values);
            count
        }
    }
}

impl Udata<'_> {
    /// `query_device` is also called by the core itself, with an udata on its stack that is
    /// in no bundle: the context is not looked for.
    ///
    /// # Safety
    ///
    /// `raw` is null or a valid udata.
    unsafe fn for_query(raw: *mut bindings::ib_udata) -> Result {
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        to_result(unsafe { bindings::metaroce_udata_none(raw) })
    }
}

/// What an RDMA device asks of the netdev below it.
impl NetDev {
    /// Whether it is an Ethernet-like interface other than the loopback one.
    pub fn is_ether(&self) -> bool {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_netdev_is_ether(self.as_ptr()) }
    }

    /// Its MAC address, as a number of 48 bits.
    pub fn mac(&self) -> u64 {
        // SAFETY: `self` holds a reference; the length was checked with `is_ether`.
        unsafe { bindings::metaroce_netdev_mac(self.as_ptr()) }
    }

    /// Its rate in Mbit/s; 0 is unknown. Process context without RTNL.
    pub fn speed(&self) -> u32 {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_netdev_speed(self.as_ptr()) }
    }

    /// Whether a line limits its rate: it is a network card, or a VLAN or bond of such.
    pub fn has_line(&self) -> bool {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_netdev_has_line(self.as_ptr()) }
    }
}
