// SPDX-License-Identifier: GPL-2.0

//! Memory regions.
//!
//! | refusal | errno |
//! | --- | --- |
//! | rights that the device does not have (on-demand paging, flush), a DMA handle | EOPNOTSUPP |
//! | rights that the kernel does not know, remote write or atomic without local write | EINVAL (from the RDMA core) |
//! | no bytes, or a range that wraps, in memory or in the region's own address space | EINVAL |
//! | addresses that are not mapped, or not for writing where the rights need it | EFAULT |
//! | more than RLIMIT_MEMLOCK allows | ENOMEM |
//! | RLIMIT_MEMLOCK is 0 | EPERM |
//! | all keys are in use | ENOSPC |
//!
//! A `rereg_mr` that is refused leaves the region as it was.

#![forbid(unsafe_code)]

use super::{device::DeviceInner, pd::Pd};
use crate::{
    kernel_ext::{
        ib::RawDevice,
        ib_attr::{MrAttr, MrRereg},
        restrack::Details,
    },
    mem::{access, Pinned, RegionInit, Registration},
};
use ::kernel::{prelude::*, sync::Arc};

/// A memory region. Dropping it deregisters: it waits for running copies.
pub struct Mr(Registration);

/// Rights that a region can have; hints and optional ones are taken and have no effect
/// beyond what [`access`] says of them.
fn checked(flags: u32) -> Result<u32> {
    let known = access::LOCAL_WRITE
        | access::REMOTE_WRITE
        | access::REMOTE_READ
        | access::REMOTE_ATOMIC
        | access::MW_BIND
        | access::ZERO_BASED
        | access::HUGETLB
        | access::OPTIONAL;
    if flags & !known != 0 {
        return Err(EOPNOTSUPP);
    }
    Ok(flags & !(access::OPTIONAL & !access::RELAXED_ORDERING))
}

/// Address of the first byte in the region's own address space.
fn iova(attr: &MrAttr, flags: u32) -> u64 {
    if flags & access::ZERO_BASED != 0 {
        0
    } else {
        attr.iova
    }
}

impl Mr {
    /// Registers memory of the calling process. Errors: those of [`Pinned::new`]; `ENOSPC`
    /// when all keys are in use.
    pub fn new(device: &DeviceInner, raw: &RawDevice, pd: &Pd, attr: &MrAttr) -> Result<Self> {
        let flags = checked(attr.access)?;
        // The last address has to exist.
        iova(attr, flags).checked_add(attr.length).ok_or(EINVAL)?;
        let pinned = Pinned::new(raw, attr.start, attr.length, flags)?;
        let registration = device.regions.register(RegionInit {
            pinned: Arc::new(pinned, GFP_KERNEL_ACCOUNT)?,
            pd: pd.number(),
            iova: iova(attr, flags),
            access: flags,
        })?;
        Ok(Self(registration))
    }

    /// A region that differs from `old` in what `what` says. The pages are shared with it
    /// where they stay the same.
    pub fn again(
        device: &DeviceInner,
        raw: &RawDevice,
        old: &Self,
        pd: &Pd,
        what: MrRereg,
        attr: &MrAttr,
    ) -> Result<Self> {
        let was = old.0.region();
        let flags = if what.access() {
            checked(attr.access)?
        } else {
            was.access()
        };
        let (start, length, iova) = if what.translation() {
            (attr.start, attr.length, iova(attr, flags))
        } else {
            (was.pinned().start(), was.pinned().length(), was.iova())
        };
        iova.checked_add(length).ok_or(EINVAL)?;
        let writes = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_ATOMIC;
        let same = !what.translation() && (flags & writes == 0 || was.pinned().is_writable());
        let pinned = if same {
            was.pinned().clone()
        } else {
            Arc::new(Pinned::new(raw, start, length, flags)?, GFP_KERNEL_ACCOUNT)?
        };
        let registration = device.regions.register(RegionInit {
            pinned,
            pd: pd.number(),
            iova,
            access: flags,
        })?;
        Ok(Self(registration))
    }

    /// Adds to what `rdma resource show` tells: where it begins, and its rights.
    pub fn show(&self, out: &mut Details<'_>) -> Result {
        let region = self.0.region();
        out.text(c"iova", format_args!("{:#x}", region.iova()))?;
        out.text(c"access", format_args!("{:#x}", region.access()))
    }

    /// The key, local and remote.
    pub fn key(&self) -> u32 {
        self.0.region().key()
    }
}
