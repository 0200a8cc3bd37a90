/*
 * What both load programs need: time, growing buffers, and a few searches.
 *
 * Time is CLOCK_MONOTONIC in nanoseconds, the same clock in all processes of a machine: the
 * difference of two stamps is a one-way latency.
 */
#ifndef TURNWIRE_BENCH_COMMON_H
#define TURNWIRE_BENCH_COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Placeholders in the templates, patched in place: all of fixed width. */
#define STAMP_BASE 1000000000000000000ull /* "ts": now + this, 19 digits */
#define STAMP_DIGITS 19
#define NUMBER_BASE 2000000000ull /* "sequence_number": n + this, 10 digits */
#define NUMBER_DIGITS 10
#define ID_DIGITS 16
#define STAMP_MARK "1000000000000000000"
#define NUMBER_MARK "2000000000"
#define RESPONSE_MARK "resp_0000000000000000"
#define ITEM_MARK "msg_0000000000000000"
#define NONCE_MARK "nonce_0000000000000000"

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(1);
}

static void *room(void *old, size_t size)
{
    void *got = realloc(old, size);
    if (!got)
        fail("out of memory");
    return got;
}

typedef struct {
    char *bytes;
    size_t size, space;
} Buffer;

static void reserve(Buffer *b, size_t more)
{
    if (b->size + more <= b->space)
        return;
    b->space = (b->size + more) * 2;
    b->bytes = room(b->bytes, b->space);
}

static void append(Buffer *b, const void *bytes, size_t size)
{
    reserve(b, size);
    memcpy(b->bytes + b->size, bytes, size);
    b->size += size;
}

static Buffer read_file(const char *path)
{
    Buffer b = {0};
    FILE *file = fopen(path, "rb");
    if (!file)
        fail(path);
    char part[65536];
    for (size_t n; (n = fread(part, 1, sizeof part, file));)
        append(&b, part, n);
    fclose(file);
    return b;
}

/* Write the lowest `digits` digits of a number in the given base, leading zeros included. */
static inline void put_digits(char *to, uint64_t value, int digits, unsigned base)
{
    for (int i = digits - 1; i >= 0; i--, value /= base)
        to[i] = "0123456789abcdef"[value % base];
}

/* Find the value of an HTTP header in a head that ends with a NUL, or NULL. */
static const char *header(const char *head, const char *name)
{
    const char *at = strcasestr(head, name);
    if (!at)
        return NULL;
    at += strlen(name);
    while (*at == ' ')
        at++;
    return at;
}

static void no_delay(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

#endif
