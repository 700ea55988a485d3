/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What the plugin uses of C: rdma-core's provider interface, and a little libc. */
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/driver.h>
#include <rdma/rdma_user_ioctl.h>

/* A macro that bindgen does not see through. */
static const unsigned int METAROCE_VERBS_IOCTL = RDMA_VERBS_IOCTL;
