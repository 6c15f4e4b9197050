/* A libc that fails on command, loaded with LD_PRELOAD into processes under test. `faulty_libc.rs` compiles this file
 * and writes the control file, which every process maps; a change there takes effect with the next call. It covers the
 * calls of Rust's standard library and of SQLite. rustix makes system calls without libc, so what it does is not seen
 * here. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The same order as the constants in faulty_libc.rs; every number has eight bytes. */
struct control {
    _Atomic int64_t clock_shift_ms;
    /* 0: writes succeed. */
    _Atomic int64_t write_errno;
    /* How many writes still fail; negative: all. */
    _Atomic int64_t writes_left;
    _Atomic int64_t sync_errno;
    _Atomic int64_t syncs_left;
    _Atomic int64_t sync_delay_ms;
    /* What was made to fail so far, in all processes. */
    _Atomic int64_t failed_writes;
    _Atomic int64_t failed_syncs;
    /* Only files below this directory fail; empty: every regular file. */
    char directory[512];
    /* Only processes with this first argument fail; empty: all. The clock is shifted in all of them. */
    char role[64];
};

static struct control *control;
static char own_role[64];

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("FAULTY_LIBC_CONTROL");
    if (!path) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *map = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    char args[4096];
    ssize_t length = 0;
    int cmdline = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (cmdline >= 0) {
        length = read(cmdline, args, sizeof(args) - 1);
        close(cmdline);
    }
    if (length > 0) {
        args[length] = 0;
        size_t first = strlen(args) + 1;
        if (first < (size_t)length) strncpy(own_role, args + first, sizeof(own_role) - 1);
    }
    if (map != MAP_FAILED) control = map;
}

static int is_below(const char *path) {
    size_t length = strlen(control->directory);
    return length == 0 || (strncmp(path, control->directory, length) == 0 && (path[length] == '/' || !path[length]));
}

/* Whether the file is one whose calls fail: a regular file below the directory. */
static int fd_is_faulty(int fd) {
    struct stat file;
    if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) return 0;
    if (!control->directory[0]) return 1;
    char link[64] = "/proc/self/fd/", digits[16], path[1024];
    size_t count = 0, at = strlen(link);
    for (int rest = fd; rest || !count; rest /= 10) digits[count++] = '0' + rest % 10;
    while (count) link[at++] = digits[--count];
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int has_role(void) {
    return !control->role[0] || strcmp(control->role, own_role) == 0;
}

/* Takes one failure from the counter, if there is one. */
static int take(_Atomic int64_t *left, _Atomic int64_t *failed) {
    int64_t value = atomic_load(left);
    while (value > 0 && !atomic_compare_exchange_weak(left, &value, value - 1)) {}
    if (value == 0) return 0;
    atomic_fetch_add(failed, 1);
    return 1;
}

/* The error of a write to this file, or 0. */
static int write_error(int fd) {
    if (!control || !control->write_errno || !has_role() || !fd_is_faulty(fd)) return 0;
    int error = (int)control->write_errno;
    return take(&control->writes_left, &control->failed_writes) ? error : 0;
}

static int path_error(const char *path) {
    if (!control || !control->write_errno || !has_role() || !path || !is_below(path)) return 0;
    int error = (int)control->write_errno;
    return take(&control->writes_left, &control->failed_writes) ? error : 0;
}

static int sync_error(int fd) {
    if (!control || !has_role()) return 0;
    int64_t delay = control->sync_delay_ms;
    if (!delay && !control->sync_errno) return 0;
    if (!fd_is_faulty(fd)) return 0;
    if (delay > 0) {
        struct timespec pause = {delay / 1000, delay % 1000 * 1000000};
        nanosleep(&pause, NULL);
    }
    int error = (int)control->sync_errno;
    return error && take(&control->syncs_left, &control->failed_syncs) ? error : 0;
}

#define FAIL(error) \
    do { \
        int failure = (error); \
        if (failure) { \
            errno = failure; \
            return -1; \
        } \
    } while (0)

ssize_t write(int fd, const void *bytes, size_t count) {
    NEXT(write);
    FAIL(write_error(fd));
    return next(fd, bytes, count);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset) {
    NEXT(pwrite);
    FAIL(write_error(fd));
    return next(fd, bytes, count, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) {
    NEXT(pwrite64);
    FAIL(write_error(fd));
    return next(fd, bytes, count, offset);
}

ssize_t writev(int fd, const struct iovec *pieces, int count) {
    NEXT(writev);
    FAIL(write_error(fd));
    return next(fd, pieces, count);
}

ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
    NEXT(pwritev);
    FAIL(write_error(fd));
    return next(fd, pieces, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t offset) {
    NEXT(pwritev64);
    FAIL(write_error(fd));
    return next(fd, pieces, count, offset);
}

/* A file that becomes shorter needs no room, and the caller that recovers from a full disk does just that. */
static int growth_error(int fd, off64_t length) {
    struct stat file;
    if (!control || !control->write_errno) return 0;
    if (control->write_errno == ENOSPC && fstat(fd, &file) == 0 && length <= file.st_size) return 0;
    return write_error(fd);
}

int ftruncate(int fd, off_t length) {
    NEXT(ftruncate);
    FAIL(growth_error(fd, length));
    return next(fd, length);
}

int ftruncate64(int fd, off64_t length) {
    NEXT(ftruncate64);
    FAIL(growth_error(fd, length));
    return next(fd, length);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    NEXT(fallocate);
    FAIL(write_error(fd));
    return next(fd, mode, offset, length);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    NEXT(fallocate64);
    FAIL(write_error(fd));
    return next(fd, mode, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    NEXT(posix_fallocate);
    int failure = write_error(fd);
    return failure ? failure : next(fd, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    NEXT(posix_fallocate64);
    int failure = write_error(fd);
    return failure ? failure : next(fd, offset, length);
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

/* Only a file that does not exist needs room. */
static int creation_error(const char *path, int flags) {
    if (!control || !control->write_errno || !(flags & O_CREAT) || access(path, F_OK) == 0) return 0;
    return path_error(path);
}

int open(const char *path, int flags, ...) {
    NEXT(open);
    MODE(flags);
    FAIL(creation_error(path, flags));
    return next(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    NEXT(open64);
    MODE(flags);
    FAIL(creation_error(path, flags));
    return next(path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    NEXT(openat);
    MODE(flags);
    if (directory == AT_FDCWD) FAIL(creation_error(path, flags));
    return next(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
    NEXT(openat64);
    MODE(flags);
    if (directory == AT_FDCWD) FAIL(creation_error(path, flags));
    return next(directory, path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    FAIL(creation_error(path, O_CREAT));
    return next(path, mode);
}

int fsync(int fd) {
    NEXT(fsync);
    FAIL(sync_error(fd));
    return next(fd);
}

int fdatasync(int fd) {
    NEXT(fdatasync);
    FAIL(sync_error(fd));
    return next(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int result = next(clock, now);
    if (result == 0 && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t shift = control->clock_shift_ms;
        int64_t nanoseconds = now->tv_nsec + shift % 1000 * 1000000;
        now->tv_sec += shift / 1000 + nanoseconds / 1000000000;
        now->tv_nsec = nanoseconds % 1000000000;
        if (now->tv_nsec < 0) {
            now->tv_nsec += 1000000000;
            now->tv_sec -= 1;
        }
    }
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
