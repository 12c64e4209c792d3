/* Appends records to a live buffer of fleetlearn, on which a device trains in the meantime.

   One process at a time may append. The file's format is in docs/internals/buffer.md. C99 and POSIX,
   little-endian machines; no other library: compile fleetlearn_buffer.c with your program. */

#ifndef FLEETLEARN_BUFFER_H
#define FLEETLEARN_BUFFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLB_MAX_ARRAYS 32

typedef enum { FLB_NEWEST = 0, FLB_RESERVOIR = 1 } flb_policy;

/* One array of a record. dtype: "<f4", "<f8", "<i8", "<i4", "|u1" or "|b1", as NumPy writes them.
   axes: 0 to 5; shape: the length of each. */
typedef struct {
    const char *name;
    const char *dtype;
    uint32_t axes;
    uint32_t shape[5];
} flb_array;

typedef struct {
    uint64_t capacity;   /* most records that are kept */
    flb_policy policy;   /* which: the newest, or a uniform sample of all */
    int durable;         /* whether a record is safe from a power cut when flb_append returns */
    uint64_t seed;       /* decides what the reservoir keeps */
    uint32_t arrays;     /* 1 to FLB_MAX_ARRAYS */
    const flb_array *array;
} flb_layout;

typedef struct flb_writer flb_writer;

/* What a function returns where it fails. flb_error says it in words; errno has the system's reason
   where it is FLB_SYSTEM. */
enum {
    FLB_OK = 0,
    FLB_SYSTEM = -1,    /* a system call failed */
    FLB_OTHER = -2,     /* the file is another buffer, or none, or damaged */
    FLB_BUSY = -3,      /* another process appends to it */
    FLB_WRONG = -4      /* a layout that is not allowed */
};

/* Open the buffer, and make it if it does not exist. *writer is to be closed by flb_close. */
int flb_open(const char *path, const flb_layout *layout, flb_writer **writer);

/* Append a record. values: the address of each array's elements, in the layout's order, C order.
   time: seconds since 1970; below 0: now. */
int flb_append(flb_writer *writer, const void *const *values, double time);

/* Return how many records were ever appended. */
uint64_t flb_count(const flb_writer *writer);

/* Let another process append. */
void flb_close(flb_writer *writer);

/* Return what a result means. */
const char *flb_error(int result);

#ifdef __cplusplus
}
#endif

#endif
