/* See fleetlearn_buffer.h; docs/internals/buffer.md has the format. */

#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE

#include "fleetlearn_buffer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HEADER 4096
#define RECORD_HEADER 24
#define ARRAYS_AT 64
#define ARRAY_BYTES 64
#define CRC_AT 48
#define COUNTED 3840 /* the checksum of the header is of the bytes before */
#define GAMMA 0x9E3779B97F4A7C15ULL

static const long count_places[2] = {3840, 3904};

struct flb_writer {
    int file;
    uint64_t capacity, seed, count;
    flb_policy policy;
    int durable;
    uint32_t arrays;
    size_t bytes[FLB_MAX_ARRAYS];
    size_t record; /* from one record to the next */
    size_t used;   /* of a record, without what fills it up */
    unsigned char *scratch;
};

static uint32_t crc32_of(uint32_t crc, const unsigned char *bytes, size_t count) {
    static uint32_t table[256];
    if (!table[1]) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? 0xEDB88320U ^ (value >> 1) : value >> 1;
            table[i] = value;
        }
    }
    crc = ~crc;
    while (count--) crc = table[(crc ^ *bytes++) & 255] ^ (crc >> 8);
    return ~crc;
}

static int put(int file, const void *bytes, size_t count, off_t place) {
    const char *next = bytes;
    while (count) {
        ssize_t done = pwrite(file, next, count, place);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return FLB_SYSTEM;
        next += done;
        place += done;
        count -= (size_t)done;
    }
    return FLB_OK;
}

static int get(int file, void *bytes, size_t count, off_t place) {
    char *next = bytes;
    while (count) {
        ssize_t done = pread(file, next, count, place);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return FLB_SYSTEM;
        if (!done) return FLB_OTHER;
        next += done;
        place += done;
        count -= (size_t)done;
    }
    return FLB_OK;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

/* The place of a record, or the capacity where the reservoir drops it. */
static uint64_t slot_of(const flb_writer *w, uint64_t sequence) {
    if (w->policy == FLB_NEWEST || sequence <= w->capacity) return (sequence - 1) % w->capacity;
    uint64_t state = mix(mix(w->seed) + sequence);
    uint64_t left_over = (0 - sequence) % sequence; /* 2^64 modulo sequence */
    for (;;) {
        state += GAMMA;
        uint64_t number = mix(state);
        if (number <= UINT64_MAX - left_over) {
            uint64_t place = number % sequence;
            return place < w->capacity ? place : w->capacity;
        }
    }
}

static size_t width_of(const char *dtype) {
    static const char *const names[] = {"<f4", "<f8", "<i8", "<i4", "|u1", "|b1"};
    static const size_t widths[] = {4, 8, 8, 4, 1, 1};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (!strcmp(dtype, names[i])) return widths[i];
    return 0;
}

static void put32(unsigned char *to, uint32_t value) { memcpy(to, &value, 4); }
static void put64(unsigned char *to, uint64_t value) { memcpy(to, &value, 8); }

/* Write the header of a buffer to which nothing was appended. Fills in the sizes of *w too. */
static int make_header(const flb_layout *layout, flb_writer *w, unsigned char *header) {
    memset(header, 0, HEADER);
    if (!layout->capacity || !layout->arrays || layout->arrays > FLB_MAX_ARRAYS ||
        (layout->policy != FLB_NEWEST && layout->policy != FLB_RESERVOIR))
        return FLB_WRONG;
    w->used = RECORD_HEADER;
    for (uint32_t i = 0; i < layout->arrays; i++) {
        const flb_array *array = &layout->array[i];
        unsigned char *row = header + ARRAYS_AT + i * ARRAY_BYTES;
        size_t size = width_of(array->dtype), name = strlen(array->name);
        if (!size || !name || name > 31 || array->axes > 5) return FLB_WRONG;
        memcpy(row, array->name, name);
        memcpy(row + 32, array->dtype, 3);
        put32(row + 40, array->axes);
        for (uint32_t axis = 0; axis < array->axes; axis++) {
            if (!array->shape[axis]) return FLB_WRONG;
            size *= array->shape[axis];
            put32(row + 44 + 4 * axis, array->shape[axis]);
        }
        w->bytes[i] = size;
        w->used += size;
    }
    w->record = (w->used + 7) / 8 * 8;
    memcpy(header, "FLBUFFER", 8);
    put32(header + 8, 1);
    put32(header + 12, HEADER);
    put64(header + 16, layout->capacity);
    put32(header + 24, (uint32_t)w->record);
    put32(header + 28, layout->arrays);
    put32(header + 32, (uint32_t)layout->policy);
    put32(header + 36, layout->durable ? 1 : 0);
    put64(header + 40, layout->seed);
    put32(header + CRC_AT, crc32_of(0, header, COUNTED));
    for (int i = 0; i < 2; i++)
        put32(header + count_places[i] + 8, crc32_of(0, header + count_places[i], 8));
    return FLB_OK;
}

/* Make the file: it appears whole, with its room on the disk, or not at all. */
static int make_file(const char *path, const unsigned char *header, const flb_writer *w) {
    size_t length = strlen(path) + 32;
    char *aside = malloc(length);
    if (!aside) return FLB_SYSTEM;
    snprintf(aside, length, "%s.%ld.tmp", path, (long)getpid());
    int file = open(aside, O_RDWR | O_CREAT | O_TRUNC, 0666);
    int result = file < 0 ? FLB_SYSTEM : FLB_OK;
    if (!result) {
        int failed = posix_fallocate(file, 0, HEADER + (off_t)(w->capacity * w->record));
        if (failed) {
            errno = failed;
            result = FLB_SYSTEM;
        }
    }
    if (!result) result = put(file, header, HEADER, 0);
    if (!result && fsync(file)) result = FLB_SYSTEM;
    if (file >= 0) close(file);
    if (!result && rename(aside, path)) result = FLB_SYSTEM;
    if (result) unlink(aside);
    free(aside);
    return result;
}

/* Find out how many records were ever appended: the count, or the number of a whole record. */
static int find_count(flb_writer *w, const unsigned char *header) {
    for (int i = 0; i < 2; i++) {
        const unsigned char *place = header + count_places[i];
        uint64_t count;
        uint32_t crc;
        memcpy(&count, place, 8);
        memcpy(&crc, place + 8, 4);
        if (crc == crc32_of(0, place, 8) && count > w->count) w->count = count;
    }
    for (uint64_t slot = 0; slot < w->capacity; slot++) {
        uint64_t sequence;
        uint32_t crc;
        int result = get(w->file, w->scratch, w->used, HEADER + (off_t)(slot * w->record));
        if (result) return result;
        memcpy(&sequence, w->scratch, 8);
        memcpy(&crc, w->scratch + 16, 4);
        if (sequence <= w->count) continue;
        uint32_t found = crc32_of(0, w->scratch, 16);
        found = crc32_of(found, w->scratch + RECORD_HEADER, w->used - RECORD_HEADER);
        if (found == crc && slot_of(w, sequence) == slot) w->count = sequence;
    }
    return FLB_OK;
}

int flb_open(const char *path, const flb_layout *layout, flb_writer **writer) {
    unsigned char wanted[HEADER], header[HEADER];
    flb_writer *w = calloc(1, sizeof *w);
    if (!w) return FLB_SYSTEM;
    w->file = -1;
    w->capacity = layout->capacity;
    w->policy = layout->policy;
    w->durable = layout->durable;
    w->arrays = layout->arrays;
    int result = make_header(layout, w, wanted);
    if (!result && access(path, F_OK)) result = make_file(path, wanted, w);
    if (!result && (w->file = open(path, O_RDWR)) < 0) result = FLB_SYSTEM;
    if (!result && flock(w->file, LOCK_EX | LOCK_NB)) result = FLB_BUSY;
    if (!result) result = get(w->file, header, HEADER, 0);
    if (!result) {
        uint32_t crc;
        memcpy(&crc, header + CRC_AT, 4);
        memset(header + CRC_AT, 0, 4);
        if (crc != crc32_of(0, header, COUNTED)) result = FLB_OTHER;
        /* What the file says must be what is wanted, except for the seed. */
        if (memcmp(header, wanted, 40) || memcmp(header + ARRAYS_AT, wanted + ARRAYS_AT,
                                                 COUNTED - ARRAYS_AT))
            result = FLB_OTHER;
        memcpy(&w->seed, header + 40, 8);
    }
    if (!result && !(w->scratch = malloc(w->record))) result = FLB_SYSTEM;
    if (!result) result = find_count(w, header);
    if (result) {
        int reason = errno;
        flb_close(w);
        errno = reason;
        return result;
    }
    memset(w->scratch, 0, w->record);
    *writer = w;
    return FLB_OK;
}

int flb_append(flb_writer *w, const void *const *values, double time) {
    uint64_t sequence = w->count + 1, slot = slot_of(w, sequence);
    if (time < 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        time = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    int result = FLB_OK;
    if (slot < w->capacity) {
        unsigned char *next = w->scratch + RECORD_HEADER;
        off_t place = HEADER + (off_t)(slot * w->record);
        for (uint32_t i = 0; i < w->arrays; i++) {
            memcpy(next, values[i], w->bytes[i]);
            next += w->bytes[i];
        }
        put64(w->scratch, sequence);
        memcpy(w->scratch + 8, &time, 8);
        uint32_t crc = crc32_of(0, w->scratch, 16);
        crc = crc32_of(crc, w->scratch + RECORD_HEADER, w->used - RECORD_HEADER);
        put32(w->scratch + 16, crc);
        put32(w->scratch + 20, 0);
        /* While the number is 0 the place is empty for readers; it comes last. */
        result = put(w->file, "\0\0\0\0\0\0\0", 8, place);
        if (!result) result = put(w->file, w->scratch + 8, w->used - 8, place + 8);
        if (!result) result = put(w->file, w->scratch, 8, place);
    }
    if (!result) {
        /* The record first: a count without its record would be one that nobody can read. */
        unsigned char count[12];
        put64(count, sequence);
        put32(count + 8, crc32_of(0, count, 8));
        result = put(w->file, count, 12, count_places[sequence % 2]);
    }
    if (!result && w->durable && fdatasync(w->file)) result = FLB_SYSTEM;
    if (!result) w->count = sequence;
    return result;
}

uint64_t flb_count(const flb_writer *writer) { return writer->count; }

void flb_close(flb_writer *writer) {
    if (!writer) return;
    if (writer->file >= 0) close(writer->file);
    free(writer->scratch);
    free(writer);
}

const char *flb_error(int result) {
    switch (result) {
    case FLB_OK: return "it went well";
    case FLB_SYSTEM: return "a system call failed; errno says why";
    case FLB_OTHER: return "the file is another buffer than the layout says, or is none, or is damaged";
    case FLB_BUSY: return "another process appends to this buffer; only one may";
    case FLB_WRONG: return "the layout is not allowed: capacity, policy, names, dtypes or shapes";
    default: return "unknown result";
    }
}
