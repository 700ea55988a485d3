// SPDX-License-Identifier: GPL-2.0
/*
 * tsc-clock.c: what perftest needs to turn cycles into time on a kernel that runs as a
 * process. It measures the cycle counter against gettimeofday(), which is a slow and uneven
 * system call there: here it is computed from the counter. And it asks /proc/cpuinfo for
 * "cpu MHz", which such a kernel does not tell. Preloaded on native kernels only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <x86intrin.h>

static uint64_t start_tsc, start_us;
static double us_per_cycle;

/* The clock and the counter read as close together as a few tries allow. */
static uint64_t sample(uint64_t *tsc)
{
	uint64_t best = UINT64_MAX, us = 0;

	for (int i = 0; i < 20; i++) {
		struct timespec ts;
		uint64_t before = __rdtsc(), after;

		clock_gettime(CLOCK_REALTIME, &ts);
		after = __rdtsc();
		if (after - before < best) {
			best = after - before;
			*tsc = before + best / 2;
			us = (uint64_t)ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
		}
	}
	return us;
}

__attribute__((constructor)) static void calibrate(void)
{
	struct timespec wait = { .tv_nsec = 100000000 };
	uint64_t tsc, us;

	start_us = sample(&start_tsc);
	nanosleep(&wait, NULL);
	us = sample(&tsc);
	us_per_cycle = (double)(us - start_us) / (double)(tsc - start_tsc);
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz)
{
	uint64_t us = start_us + (uint64_t)((double)(__rdtsc() - start_tsc) * us_per_cycle);

	(void)tz;
	tv->tv_sec = us / 1000000;
	tv->tv_usec = us % 1000000;
	return 0;
}

FILE *fopen(const char *restrict path, const char *restrict mode)
{
	static char cpuinfo[64];
	FILE *(*next)(const char *, const char *);

	if (strcmp(path, "/proc/cpuinfo") == 0) {
		snprintf(cpuinfo, sizeof(cpuinfo), "processor\t: 0\ncpu MHz\t\t: %.3f\n", 1 / us_per_cycle);
		return fmemopen(cpuinfo, strlen(cpuinfo), "r");
	}
	next = (FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen");
	return next ? next(path, mode) : NULL;
}
