// Loaded before libc (LD_PRELOAD): lets one of a process's calls on files below a folder fail, moves its clocks, and keeps
// what a loss of power would leave.
//
// faults.py compiles it and says what the environment variables mean. A call is counted if it could fail in the way
// that is asked for; the N-th one that is counted fails. SQLite, Python and Rust all call these functions of libc.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, OPEN = 4, MAKE = 8, CHANGE = 16, SYNC = 32 };

static char below[4096];     // the folder; empty: no file is touched
static size_t below_length;
static atomic_long counted;
static long nth;             // 0: count only
static int counts;           // which kinds of calls are counted
static int error;            // what a call fails with
static int for_good;         // all counted calls after the N-th fail, too
static int log_file = -1;
static char watched[4096];   // the folder of which what is synced is kept; empty: none
static size_t watched_length;
static char kept[4096];      // the folder where it is kept, by the numbers of inodes
static double *clocks;       // seconds that CLOCK_REALTIME and CLOCK_MONOTONIC are ahead, in a file that is shared

// Called when the library is loaded, and by a fork that has been given its own environment.
__attribute__((constructor)) void faults_begin(void) {
    const char *folder = getenv("FAULTS_BELOW"), *number = getenv("FAULTS_NTH"), *kind = getenv("FAULTS_KIND");
    const char *log = getenv("FAULTS_LOG"), *clock_file = getenv("FAULTS_CLOCKS");
    const char *disk = getenv("FAULTS_WATCHED"), *copy = getenv("FAULTS_KEPT");
    snprintf(below, sizeof below, "%s", folder ? folder : "");
    below_length = strlen(below);
    snprintf(watched, sizeof watched, "%s", disk && copy ? disk : "");
    watched_length = strlen(watched);
    snprintf(kept, sizeof kept, "%s", copy ? copy : "");
    nth = number ? atol(number) : 0;
    counted = 0;
    if (kind && !strcmp(kind, "full")) {
        counts = WRITE | MAKE | SYNC, error = ENOSPC, for_good = 1;
    } else if (kind && !strcmp(kind, "read-only")) {
        counts = WRITE | MAKE | CHANGE, error = EROFS, for_good = 1;
    } else {
        counts = READ | WRITE | OPEN | MAKE | CHANGE | SYNC, error = EIO, for_good = 0;
    }
    log_file = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (clock_file) {
        int file = (int)syscall(SYS_openat, AT_FDCWD, clock_file, O_RDONLY | O_CLOEXEC);
        void *found = file < 0 ? MAP_FAILED : mmap(NULL, 2 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (found != MAP_FAILED) clocks = found;
    }
}

// Return 0 if the call is to go through; 1 if it fails, with errno set; 2 if it is the first that fails for good.
static int fails(int kind, const char *call, const char *path) {
    if (!below_length || !(kind & counts) || !path || strncmp(path, below, below_length)) return 0;
    long number = ++counted;
    if (log_file >= 0) {
        char line[4400];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
        if (syscall(SYS_write, log_file, line, length) < 0) return 0;
    }
    if (!nth || number < nth || (number > nth && !for_good)) return 0;
    errno = error;
    return number == nth && for_good ? 2 : 1;
}

static int fails_at(int kind, const char *call, int file) {
    if (!below_length || !(kind & counts)) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    int before = errno;
    ssize_t length = readlink(name, path, sizeof path - 1);
    errno = before;
    path[length < 0 ? 0 : length] = 0;
    return fails(kind, call, path);
}

#define REAL(name) ({ static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

// A disk becomes full in the middle of a write: the first one that fails writes its first half.
#define WRITES(name, file, size, half, ...)                                       \
    switch (fails_at(WRITE, #name, file)) {                                       \
        case 2: if (error == ENOSPC && (size) > 1) return half;                   \
        /* fall through */                                                        \
        case 1: errno = error; return -1;                                         \
    }                                                                             \
    return REAL(name)(__VA_ARGS__);

ssize_t write(int file, const void *bytes, size_t size) {
    WRITES(write, file, size, REAL(write)(file, bytes, size / 2), file, bytes, size)
}
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
    WRITES(pwrite, file, size, REAL(pwrite)(file, bytes, size / 2, at), file, bytes, size, at)
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    WRITES(pwrite64, file, size, REAL(pwrite64)(file, bytes, size / 2, at), file, bytes, size, at)
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    WRITES(writev, file, number, REAL(writev)(file, parts, number / 2), file, parts, number)
}

#define AT_FILE(kind, result, name, arguments, file, ...)                         \
    result name arguments {                                                       \
        if (fails_at(kind, #name, file)) return -1;                               \
        return REAL(name)(__VA_ARGS__);                                           \
    }
AT_FILE(READ, ssize_t, read, (int file, void *bytes, size_t size), file, file, bytes, size)
AT_FILE(READ, ssize_t, pread, (int file, void *bytes, size_t size, off_t at), file, file, bytes, size, at)
AT_FILE(READ, ssize_t, pread64, (int file, void *bytes, size_t size, off64_t at), file, file, bytes, size, at)
AT_FILE(READ, ssize_t, preadv, (int file, const struct iovec *to, int n, off_t at), file, file, to, n, at)
AT_FILE(READ, ssize_t, preadv64, (int file, const struct iovec *to, int n, off64_t at), file, file, to, n, at)
AT_FILE(WRITE, int, ftruncate, (int file, off_t size), file, file, size)
AT_FILE(WRITE, int, ftruncate64, (int file, off64_t size), file, file, size)
AT_FILE(WRITE, int, fallocate, (int file, int mode, off_t from, off_t size), file, file, mode, from, size)
AT_FILE(WRITE, int, fallocate64, (int file, int mode, off64_t from, off64_t size), file, file, mode, from, size)

// Keep what a loss of power leaves of a file from now on: its bytes, or a folder's names. Return 0, or -1 with errno.
static int keep(int file) {
    char name[64], path[4096], draft[4200], copy[4200], block[65536];
    struct stat found;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (strncmp(path, watched, watched_length) || fstat(file, &found)) return 0;
    snprintf(draft, sizeof draft, "%s/draft-%ld", kept, syscall(SYS_gettid));
    snprintf(copy, sizeof copy, "%s/%lu", kept, (unsigned long)found.st_ino);
    int to = (int)syscall(SYS_openat, AT_FDCWD, draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (to < 0) return -1;
    if (S_ISDIR(found.st_mode)) {
        DIR *folder = opendir(path);
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            int size = snprintf(block, sizeof block, "%c %lu %s\n", entry->d_type == DT_DIR ? 'd' : entry->d_type == DT_REG ? 'f' : '-',
                                (unsigned long)entry->d_ino, entry->d_name);
            if (syscall(SYS_write, to, block, size) != size) break;
        }
        if (folder) closedir(folder);
    } else {
        int from = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
        ssize_t size;
        while (from >= 0 && (size = syscall(SYS_read, from, block, sizeof block)) > 0)
            if (syscall(SYS_write, to, block, size) != size) break;
        if (from >= 0) syscall(SYS_close, from);
    }
    syscall(SYS_close, to);
    return (int)syscall(SYS_renameat, AT_FDCWD, draft, AT_FDCWD, copy);
}

// A test needs no disk to have anything. It would wait for it.
#define SYNCS(name)                                                               \
    int name(int file) {                                                          \
        if (fails_at(SYNC, #name, file)) return -1;                               \
        if (watched_length) return keep(file);                                    \
        return below_length ? 0 : REAL(name)(file);                               \
    }
SYNCS(fsync)
SYNCS(fdatasync)

// These return the error.
int posix_fallocate(int file, off_t from, off_t size) {
    return fails_at(WRITE, "posix_fallocate", file) ? error : REAL(posix_fallocate)(file, from, size);
}
int posix_fallocate64(int file, off64_t from, off64_t size) {
    return fails_at(WRITE, "posix_fallocate64", file) ? error : REAL(posix_fallocate64)(file, from, size);
}

// To open a file for writing changes a read-only file system; to make one needs room.
static int opens(const char *call, const char *path, int flags) {
    struct stat found;
    int before = errno, makes = (flags & O_CREAT) && stat(path, &found);
    errno = before;
    int kind = OPEN | (makes ? MAKE : 0) | ((flags & O_ACCMODE) != O_RDONLY ? CHANGE : 0);
    return fails(kind, call, path);
}
#define OPENS(name, arguments, ...)                                               \
    int name arguments {                                                          \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;               \
        va_end(rest);                                                             \
        return opens(#name, path, flags) ? -1 : REAL(name)(__VA_ARGS__, mode);    \
    }
OPENS(open, (const char *path, int flags, ...), path, flags)
OPENS(open64, (const char *path, int flags, ...), path, flags)
OPENS(openat, (int folder, const char *path, int flags, ...), folder, path, flags)
OPENS(openat64, (int folder, const char *path, int flags, ...), folder, path, flags)

#define AT_PATH(kind, name, arguments, path, ...)                                 \
    int name arguments {                                                          \
        if (fails(kind, #name, path)) return -1;                                  \
        return REAL(name)(__VA_ARGS__);                                           \
    }
AT_PATH(MAKE, rename, (const char *from, const char *to), to, from, to)
AT_PATH(MAKE, renameat, (int a, const char *from, int b, const char *to), to, a, from, b, to)
AT_PATH(MAKE, link, (const char *from, const char *to), to, from, to)
AT_PATH(MAKE, linkat, (int a, const char *from, int b, const char *to, int flags), to, a, from, b, to, flags)
AT_PATH(MAKE, mkdir, (const char *path, mode_t mode), path, path, mode)
AT_PATH(MAKE, mkdirat, (int folder, const char *path, mode_t mode), path, folder, path, mode)
AT_PATH(CHANGE, unlink, (const char *path), path, path)
AT_PATH(CHANGE, unlinkat, (int folder, const char *path, int flags), path, folder, path, flags)

// Clocks. What the kernel waits for by itself (a timeout of epoll) takes as long as it does.

static void move(clockid_t clock, struct timespec *at) {
    if (!clocks) return;
    double ahead = 0;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) ahead = clocks[0];
    if (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME) ahead = clocks[1];
    long long nanoseconds = at->tv_nsec + (long long)(ahead * 1e9);
    at->tv_sec += nanoseconds / 1000000000;
    at->tv_nsec = nanoseconds % 1000000000;
    if (at->tv_nsec < 0) at->tv_nsec += 1000000000, at->tv_sec -= 1;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = REAL(clock_gettime)(clock, at);
    if (!result) move(clock, at);
    return result;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int result = REAL(gettimeofday)(at, zone);
    struct timespec moved = {at->tv_sec, at->tv_usec * 1000};
    move(CLOCK_REALTIME, &moved);
    at->tv_sec = moved.tv_sec, at->tv_usec = moved.tv_nsec / 1000;
    return result;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
