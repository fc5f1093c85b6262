/* A stand-in for the CUDA runtime and cuBLAS: the CUDA build of torch runs its own host code on a machine without a GPU.
 *
 * Device memory is host memory, copies are real, kernels do nothing. A stream is a queue of operations and an event a
 * position in a queue, so that a test can have copies happen as late as CUDA allows: what torch or MemScale reads too
 * early is then visibly not there yet. See README.md for the settings and for what this can and cannot show.
 *
 * It is loaded by LD_PRELOAD, before libcudart and libcublas, and replaces the functions of theirs that it defines.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#define MOST_DEVICES 8
#define MOST_FAILURES 16
#define ALIGNMENT 512 /* of device memory, as cudaMalloc's */

/* ------------------------------------------------------------------ settings */

enum copies { COPIES_NOW, COPIES_LATE, COPIES_POISONED, COPIES_RANDOM };

static enum copies copies = COPIES_NOW;
static int device_count = 1;
static size_t device_memory = (size_t)8 << 30;
static size_t context_memory = 0; /* what a context takes of a device when it is opened */
static int refuses_page_locks = 0;
static int is_verbose = 0;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device = 0;
static __thread cudaError_t pending_error = cudaSuccess;

static size_t used_memory[MOST_DEVICES];
static int has_context[MOST_DEVICES];
static long kernels_launched = 0;
static unsigned long random_state = 12345;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

/* End the process, which would else test something other than was asked for. */
static void refuse(const char *format, const char *value) {
    fputs("fakecuda: ", stderr);
    fprintf(stderr, format, value);
    fputs(".\n", stderr);
    _exit(78);
}

static unsigned long number(const char *name, const char *otherwise) {
    const char *value = setting(name, otherwise);
    char *end;
    unsigned long result = strtoul(value, &end, 10);
    if (*end || *value == '-') {
        char format[64];
        snprintf(format, sizeof format, "%s is a whole number, not %%s", name);
        refuse(format, value);
    }
    return result;
}

static void run_all(void);

/* For tests, by ctypes: when asynchronous copies happen from now on; what is queued happens before. */
int fakecuda_set_copies(const char *mode) {
    static const char *names[] = {"now", "late", "poisoned", "random"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(mode, names[i])) continue;
        pthread_mutex_lock(&mutex);
        run_all();
        copies = (enum copies)i;
        pthread_mutex_unlock(&mutex);
        return 0;
    }
    return -1;
}

void fakecuda_set_page_locks(int are_refused) { refuses_page_locks = are_refused; }

__attribute__((constructor)) static void read_settings(void) {
    static const char *drivers[] = {DRIVER_FILES}; /* of build.py */
    for (size_t i = 0; i < sizeof drivers / sizeof *drivers; i++)
        if (access(drivers[i], F_OK) == 0)
            refuse("this machine has an NVIDIA driver (%s): run the tests on it, without this stand-in", drivers[i]);
    if (fakecuda_set_copies(setting("FAKECUDA_COPIES", "now")))
        refuse("FAKECUDA_COPIES is now, late, poisoned or random, not %s", getenv("FAKECUDA_COPIES"));
    device_count = number("FAKECUDA_DEVICES", "1");
    if (device_count < 1 || device_count > MOST_DEVICES)
        refuse("FAKECUDA_DEVICES is a number from 1 to 8, not %s", getenv("FAKECUDA_DEVICES"));
    device_memory = number("FAKECUDA_MEMORY", "8589934592");
    context_memory = number("FAKECUDA_CONTEXT", "0");
    const char *page_locks = setting("FAKECUDA_PAGE_LOCKS", "allow");
    refuses_page_locks = !strcmp(page_locks, "refuse");
    if (!refuses_page_locks && strcmp(page_locks, "allow"))
        refuse("FAKECUDA_PAGE_LOCKS is allow or refuse, not %s", page_locks);
    random_state = number("FAKECUDA_SEED", "12345");
    is_verbose = number("FAKECUDA_VERBOSE", "0");
}

/* ------------------------------------------------------------------ errors that a test asks for */

static struct failure {
    char call[64];
    long after; /* calls that still succeed */
    int error; /* of the runtime or of cuBLAS */
} failures[MOST_FAILURES];

/* For tests, by ctypes: let the call after the next `after` ones of a function fail with an error, once; -1 if it can
 * not. A kernel that nvcc's stubs launch fails as `cudaLaunchKernel`. */
int fakecuda_fail(const char *call, long after, int error) {
    static const char *never[] = {"__cudaLaunchKernel", "cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError",
                                  "cudaPeekAtLastError"};
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        if (!strcmp(call, never[i])) return -1;
    if (!strncmp(call, "fakecuda_", 9)) return -1;
    Dl_info found, here;
    void *function = dlsym(RTLD_DEFAULT, call);
    if (!function || !dladdr(function, &found) || !dladdr(&device_count, &here)) return -1;
    if (found.dli_fbase != here.dli_fbase) return -1; /* not replaced */
    for (int i = 0; i < MOST_FAILURES; i++) {
        if (failures[i].call[0]) continue;
        snprintf(failures[i].call, sizeof failures[i].call, "%s", call);
        failures[i].after = after;
        failures[i].error = error;
        return 0;
    }
    return -1;
}

/* For tests: those that were not met are not to be any more; returns how many. */
int fakecuda_succeed(void) {
    int count = 0;
    for (int i = 0; i < MOST_FAILURES; i++) {
        count += failures[i].call[0] != 0;
        failures[i].call[0] = 0;
    }
    return count;
}

static cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) pending_error = error;
    return error;
}

/* Under the lock: the error that a test asked for in this call, or 0. */
static int wanted_error(const char *call) {
    for (int i = 0; i < MOST_FAILURES; i++) {
        if (strcmp(failures[i].call, call)) continue;
        if (failures[i].after-- > 0) continue;
        failures[i].call[0] = 0;
        return failures[i].error;
    }
    return 0;
}

static cudaError_t wanted_failure(const char *call) { return failed((cudaError_t)wanted_error(call)); }

/* Every call that can fail begins with this: it takes the lock, which the call releases. */
#define BEGIN                                                \
    pthread_mutex_lock(&mutex);                              \
    cudaError_t wanted = wanted_failure(__func__);           \
    if (wanted != cudaSuccess) {                             \
        pthread_mutex_unlock(&mutex);                        \
        return wanted;                                       \
    }
#define END(error) return pthread_mutex_unlock(&mutex), failed(error)
/* Or with this, if it needs no lock. */
#define MAY_FAIL                                             \
    do {                                                     \
        BEGIN;                                               \
        pthread_mutex_unlock(&mutex);                        \
    } while (0)

static void open_context(int device, const char *call) {
    if (has_context[device]) return;
    has_context[device] = 1;
    used_memory[device] += context_memory;
    if (is_verbose) fprintf(stderr, "fakecuda: %s opens a context on device %d\n", call, device);
}

/* For tests. */
int fakecuda_has_context(int device) { return has_context[device]; }
int fakecuda_device_count(void) { return device_count; }
long fakecuda_kernels(void) { return kernels_launched; }
size_t fakecuda_used(int device) { return used_memory[device]; }

/* ------------------------------------------------------------------ streams and events */

enum kind { COPY, FILL, NOTHING, WAIT, HOST_FUNCTION };

struct operation {
    enum kind kind;
    void *target;
    const void *source;
    size_t bytes;
    int value;
    int owns_source;
    struct CUstream_st *other; /* WAIT: until this stream has done `position` operations */
    unsigned long position;
    cudaHostFn_t function;
    void *argument;
    struct operation *next;
};

struct CUstream_st {
    struct operation *first, *last;
    unsigned long queued, done;
    struct CUstream_st *next;
};

struct CUevent_st {
    struct CUstream_st *stream; /* NULL until it is recorded */
    unsigned long position;
};

static struct CUstream_st default_streams[MOST_DEVICES];
static struct CUstream_st *created_streams = NULL;

static struct CUstream_st *stream_of(cudaStream_t stream) {
    int is_default = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? &default_streams[current_device] : stream;
}

/* Run a stream's operations up to a position, and first those that they wait for. */
static void run(struct CUstream_st *stream, unsigned long position) {
    while (stream->first && stream->done < position) {
        struct operation *each = stream->first;
        stream->first = each->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        switch (each->kind) {
        case COPY: memmove(each->target, each->source, each->bytes); break;
        case FILL: memset(each->target, each->value, each->bytes); break;
        case WAIT: run(each->other, each->position); break;
        case HOST_FUNCTION: each->function(each->argument); break;
        case NOTHING: break;
        }
        if (each->owns_source) free((void *)each->source);
        free(each);
    }
}

static void run_all(void) {
    for (int i = 0; i < MOST_DEVICES; i++) run(&default_streams[i], default_streams[i].queued);
    for (struct CUstream_st *each = created_streams; each; each = each->next) run(each, each->queued);
}

static unsigned long next_random(void) {
    random_state = random_state * 6364136223846793005ul + 1442695040888963407ul;
    return random_state >> 33;
}

/* Let one stream or another catch up, or none. */
static void run_some(void) {
    if (next_random() % 2) return;
    unsigned long count = device_count;
    for (struct CUstream_st *each = created_streams; each; each = each->next) count++;
    unsigned long chosen = next_random() % count;
    struct CUstream_st *stream = created_streams;
    if (chosen < (unsigned long)device_count) {
        stream = &default_streams[chosen];
    } else {
        for (chosen -= device_count; chosen; chosen--) stream = stream->next;
    }
    run(stream, stream->queued);
}

static unsigned long queue(struct CUstream_st *stream, struct operation operation) {
    struct operation *each = malloc(sizeof *each);
    *each = operation;
    each->next = NULL;
    if (stream->last) stream->last->next = each;
    else stream->first = each;
    stream->last = each;
    stream->queued++;
    if (copies == COPIES_NOW) run(stream, stream->queued);
    if (copies == COPIES_RANDOM) run_some();
    return stream->queued;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    BEGIN;
    open_context(current_device, __func__);
    *stream = calloc(1, sizeof **stream);
    (*stream)->next = created_streams;
    created_streams = *stream;
    END(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    MAY_FAIL;
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    MAY_FAIL;
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

/* Streams and events are not freed: a queued operation may refer to them. Torch makes few and keeps them. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    MAY_FAIL;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    MAY_FAIL;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    MAY_FAIL;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    BEGIN;
    run(stream_of(stream), stream_of(stream)->queued);
    END(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    BEGIN;
    END(stream_of(stream)->first ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void) {
    BEGIN;
    run_all();
    END(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    BEGIN;
    if (event->stream)
        queue(stream_of(stream),
              (struct operation){.kind = WAIT, .other = event->stream, .position = event->position});
    END(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    BEGIN;
    queue(stream_of(stream),
          (struct operation){.kind = HOST_FUNCTION, .function = function, .argument = argument});
    END(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    MAY_FAIL;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    MAY_FAIL;
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    MAY_FAIL;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    MAY_FAIL;
    *event = calloc(1, sizeof **event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    MAY_FAIL;
    return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    MAY_FAIL;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    BEGIN;
    event->stream = stream_of(stream);
    event->position = queue(event->stream, (struct operation){.kind = NOTHING});
    END(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    MAY_FAIL;
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    BEGIN;
    int is_over = !event->stream || event->stream->done >= event->position;
    END(is_over ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    BEGIN;
    if (event->stream) run(event->stream, event->position);
    END(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    MAY_FAIL;
    *milliseconds = 0.01f;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ memory */

enum memory { DEVICE_MEMORY, PAGE_LOCKED, REGISTERED };

static struct range {
    char *start;
    size_t bytes;
    enum memory kind;
    int device;
    struct range *next;
} *ranges = NULL;

static struct range *range_at(const void *pointer) {
    for (struct range *each = ranges; each; each = each->next)
        if ((char *)pointer >= each->start && (char *)pointer < each->start + each->bytes) return each;
    return NULL;
}

static int is_on_device(const void *pointer) {
    struct range *range = range_at(pointer);
    return range && range->kind == DEVICE_MEMORY;
}

static void add_range(void *start, size_t bytes, enum memory kind) {
    struct range *range = malloc(sizeof *range);
    *range = (struct range){start, bytes, kind, current_device, ranges};
    ranges = range;
}

static int remove_range(void *start) {
    for (struct range **each = &ranges; *each; each = &(*each)->next) {
        struct range *found = *each;
        if (found->start != start) continue;
        if (found->kind == DEVICE_MEMORY) used_memory[found->device] -= found->bytes;
        *each = found->next;
        free(found);
        return 1;
    }
    return 0;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    BEGIN;
    open_context(current_device, __func__);
    *pointer = NULL;
    if (used_memory[current_device] + bytes > device_memory) END(cudaErrorMemoryAllocation);
    if (bytes) {
        if (posix_memalign(pointer, ALIGNMENT, bytes)) END(cudaErrorMemoryAllocation);
        add_range(*pointer, bytes, DEVICE_MEMORY);
        used_memory[current_device] += bytes;
    }
    END(cudaSuccess);
}

cudaError_t cudaFree(void *pointer) {
    BEGIN;
    open_context(current_device, __func__); /* the customary way to open one */
    if (pointer) {
        run_all(); /* it waits for the device */
        if (!remove_range(pointer)) END(cudaErrorInvalidValue);
        free(pointer);
    }
    END(cudaSuccess);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    BEGIN;
    if (refuses_page_locks || posix_memalign(pointer, 4096, bytes ? bytes : 1)) END(cudaErrorMemoryAllocation);
    add_range(*pointer, bytes ? bytes : 1, PAGE_LOCKED);
    END(cudaSuccess);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    MAY_FAIL;
    return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaFreeHost(void *pointer) {
    BEGIN;
    run_all();
    if (!remove_range(pointer)) END(cudaErrorInvalidValue);
    free(pointer);
    END(cudaSuccess);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    BEGIN;
    open_context(current_device, __func__);
    if (refuses_page_locks) END(cudaErrorMemoryAllocation);
    if (range_at(pointer) || range_at((char *)pointer + bytes - 1)) END(cudaErrorHostMemoryAlreadyRegistered);
    add_range(pointer, bytes, REGISTERED);
    END(cudaSuccess);
}

cudaError_t cudaHostUnregister(void *pointer) {
    BEGIN;
    run_all();
    END(remove_range(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    BEGIN;
    memset(attributes, 0, sizeof *attributes);
    struct range *range = range_at(pointer);
    if (range) {
        attributes->type = range->kind == DEVICE_MEMORY ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        attributes->device = range->device;
        attributes->devicePointer = (void *)pointer;
    }
    if (!range || range->kind != DEVICE_MEMORY) attributes->hostPointer = (void *)pointer;
    END(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    BEGIN;
    open_context(current_device, __func__);
    *total = device_memory;
    *available = device_memory - used_memory[current_device];
    END(cudaSuccess);
}

/* Under the lock. A copy to or from pageable memory does not overlap with the host, as in CUDA. */
static void copy(void *target, const void *source, size_t bytes, struct CUstream_st *stream, int is_async) {
    struct operation operation = {.kind = COPY, .target = target, .source = source, .bytes = bytes};
    if (is_async && !range_at(source)) { /* staged: the source may be changed at once */
        operation.source = memcpy(malloc(bytes ? bytes : 1), source, bytes);
        operation.owns_source = 1;
    } else if (is_async && copies == COPIES_POISONED && range_at(target) && !is_on_device(target)) {
        memset(target, 0xFF, bytes); /* who reads it before the copy has landed gets NaN */
    }
    unsigned long position = queue(stream, operation);
    if (!is_async || !range_at(target)) run(stream, position);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    BEGIN;
    copy(target, source, bytes, stream_of(stream), 1);
    END(cudaSuccess);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    BEGIN;
    copy(target, source, bytes, stream_of(NULL), 0);
    END(cudaSuccess);
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                size_t bytes, cudaStream_t stream) {
    BEGIN;
    copy(target, source, bytes, stream_of(stream), 1);
    END(cudaSuccess);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    BEGIN;
    for (size_t row = 0; row < height; row++)
        copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width,
             stream_of(stream), 1);
    END(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    BEGIN;
    queue(stream_of(stream),
          (struct operation){.kind = FILL, .target = target, .value = value, .bytes = bytes});
    END(cudaSuccess);
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    MAY_FAIL;
    cudaError_t error = cudaMemsetAsync(target, value, bytes, NULL);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

/* ------------------------------------------------------------------ devices */

cudaError_t cudaGetDeviceCount(int *count) {
    MAY_FAIL;
    *count = device_count;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    MAY_FAIL;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    BEGIN;
    if (device < 0 || device >= device_count) END(cudaErrorInvalidDevice);
    current_device = device;
    open_context(device, __func__);
    END(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int *version) {
    MAY_FAIL;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    MAY_FAIL;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = pending_error;
    pending_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return pending_error; }

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheStandIn";
}

const char *cudaGetErrorString(cudaError_t error) {
    static __thread char text[64];
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    snprintf(text, sizeof text, "error %d of the stand-in for CUDA", error);
    return text;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    MAY_FAIL;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA GeForce RTX 3090");
    properties->totalGlobalMem = device_memory;
    properties->major = 8;
    properties->minor = 6;
    properties->multiProcessorCount = 82;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 101376;
    properties->sharedMemPerMultiprocessor = 102400;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->maxThreadsPerMultiProcessor = 1536;
    properties->maxBlocksPerMultiProcessor = 16;
    properties->l2CacheSize = 6 << 20;
    properties->totalConstMem = 65536;
    properties->unifiedAddressing = 1;
    properties->textureAlignment = 512;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    MAY_FAIL;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 101376; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 102400; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1536; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 16; break;
    case cudaDevAttrMultiProcessorCount: *value = 82; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = 6 << 20; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 6; break;
    default: *value = 0;
}
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    MAY_FAIL;
    snprintf(id, length, "0000:%02d:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) {
    MAY_FAIL;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned int flags) {
    MAY_FAIL;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ kernels, which do nothing */

static cudaError_t launch(const char *call, cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    cudaError_t error = wanted_failure(call);
    if (error == cudaSuccess) {
        kernels_launched++;
        queue(stream_of(stream), (struct operation){.kind = NOTHING});
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch("cudaLaunchKernel", stream);
}

/* What nvcc's stubs call; it is in no header. */
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch("cudaLaunchKernel", stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    MAY_FAIL;
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(__func__, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    MAY_FAIL;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 86;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    MAY_FAIL;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size,
                                                          size_t shared) {
    MAY_FAIL;
    *blocks = 4;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared, unsigned int flags) {
    MAY_FAIL;
    *blocks = 4;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    MAY_FAIL;
    static char memory[1 << 16];
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    MAY_FAIL;
    return cudaSuccess;
}

static int succeed(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    MAY_FAIL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = driver ? dlsym(driver, symbol) : NULL;
    *function = found ? found : (void *)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) {
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaProfilerStop(void) {
    MAY_FAIL;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ cuBLAS, which succeeds and computes nothing */

static int status_of(const char *call) {
    pthread_mutex_lock(&mutex);
    int error = wanted_error(call);
    pthread_mutex_unlock(&mutex);
    return error;
}

/* The headers give these other arguments, which nothing here reads: so they are defined under other names. */
#define NAMED(name) __asm__(".globl " #name "\n.set " #name ", fakecuda_" #name);
#define SUCCEEDS(name) \
    int fakecuda_##name(void) { return status_of(#name); } \
    NAMED(name)
#define MAKES_A_HANDLE(name)              \
    int fakecuda_##name(void **handle) {  \
        *handle = calloc(1, 64);          \
        return status_of(#name);          \
    }                                     \
    NAMED(name)

MAKES_A_HANDLE(cublasCreate_v2)
MAKES_A_HANDLE(cublasLtCreate)
MAKES_A_HANDLE(cublasLtMatmulDescCreate)
MAKES_A_HANDLE(cublasLtMatmulPreferenceCreate)
MAKES_A_HANDLE(cublasLtMatrixLayoutCreate)
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasLtDestroy)
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return status_of(__func__);
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return status_of(__func__);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    memset(results, 0, sizeof results[0]);
    *found = 1;
    return status_of(__func__);
}

/* ------------------------------------------------------------------ for computing.py */

/* Run what a stream has queued, and what that waits for: the host is about to do the work of its next kernel. */
void fakecuda_run_stream(cudaStream_t stream, int device) {
    pthread_mutex_lock(&mutex);
    struct CUstream_st *queue = stream ? stream : &default_streams[device];
    run(queue, queue->queued);
    pthread_mutex_unlock(&mutex);
}
