/* A barrier of processes that map the same memory, for collectives inside a host.
 *
 * Whoever arrives last lets the others go. A process spins for a moment, for ranks that have a core each arrive within
 * microseconds of each other, and then sleeps in the kernel, so that ranks that share a core do not hold each other up.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct barrier {
    _Atomic uint32_t turn; /* how often all have arrived; sleepers wait for it to change */
    _Atomic uint32_t arrived;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t broken;
};

enum { PASSED = 0, BROKEN = 1, NOT_YET = 2 };

static void wake_all(struct barrier *barrier) {
    syscall(SYS_futex, &barrier->turn, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

/* Arrive; returns the turn to wait for the end of. */
uint32_t danlu_barrier_arrive(struct barrier *barrier, uint32_t ranks) {
    uint32_t turn = atomic_load(&barrier->turn);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == ranks) {
        atomic_store(&barrier->arrived, 0); /* before the turn: whoever sees the next turn may arrive at it */
        atomic_store(&barrier->turn, turn + 1);
        if (atomic_load(&barrier->sleepers)) wake_all(barrier);
    }
    return turn;
}

static int state_of(struct barrier *barrier, uint32_t turn) {
    if (atomic_load(&barrier->turn) != turn) return PASSED;
    return atomic_load(&barrier->broken) ? BROKEN : NOT_YET;
}

/* Wait until all have arrived at a turn, for at most so long. */
int danlu_barrier_wait(struct barrier *barrier, uint32_t turn, uint32_t spins, uint32_t milliseconds) {
    int state;
    for (uint32_t spin = 0; spin < spins; spin++) {
        if ((state = state_of(barrier, turn)) != NOT_YET) return state;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    struct timespec end, now, left;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    while ((state = state_of(barrier, turn)) == NOT_YET) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t rest = (int64_t)(end.tv_sec - now.tv_sec) * 1000000000 + (end.tv_nsec - now.tv_nsec);
        if (rest <= 0) return NOT_YET;
        left.tv_sec = rest / 1000000000;
        left.tv_nsec = rest % 1000000000;
        atomic_fetch_add(&barrier->sleepers, 1);
        /* Returns at once if the turn is over: the kernel compares it again. */
        if (!atomic_load(&barrier->broken))
            syscall(SYS_futex, &barrier->turn, FUTEX_WAIT, turn, &left, 0, 0);
        atomic_fetch_sub(&barrier->sleepers, 1);
    }
    return state;
}

/* End this and every later wait of all processes. */
void danlu_barrier_break(struct barrier *barrier) {
    atomic_store(&barrier->broken, 1);
    /* A sleeper that looked before may go to sleep after: turn is unchanged, so it is woken by the slices of its wait. */
    wake_all(barrier);
}
