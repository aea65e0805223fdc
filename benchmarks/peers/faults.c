/* Makes a part of the calls of read, pread and pread64 on files below a folder fail with EIO.

   cc -shared -fPIC -O2 -o faults.so faults.c -ldl
   FAULTS_FOLDER=/corpus FAULTS_PERCENT=5 LD_PRELOAD=./faults.so program

   Reads of mapped files and reads inside libc (fread) do not go through these calls. FAULTS_COUNT
   names a file to which one byte per failed call is appended. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static unsigned long long state;

static int fails(int fd) {
    const char *folder = getenv("FAULTS_FOLDER"), *percent = getenv("FAULTS_PERCENT");
    char link[64], path[4096];
    if (!folder || !percent) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    if (strncmp(path, folder, strlen(folder))) return 0;
    if (!state) state = 0x9E3779B97F4A7C15ULL * (unsigned long long)getpid();
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    if (state % 100 >= (unsigned long long)atoi(percent)) return 0;
    const char *count = getenv("FAULTS_COUNT");
    if (count) {
        int out = open(count, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (out >= 0) { if (write(out, "x", 1) < 0) {} close(out); }
    }
    errno = EIO;
    return 1;
}

ssize_t read(int fd, void *buffer, size_t size) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    return fails(fd) ? -1 : real(fd, buffer, size);
}

ssize_t pread(int fd, void *buffer, size_t size, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    return fails(fd) ? -1 : real(fd, buffer, size, offset);
}

ssize_t pread64(int fd, void *buffer, size_t size, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    return fails(fd) ? -1 : real(fd, buffer, size, offset);
}
