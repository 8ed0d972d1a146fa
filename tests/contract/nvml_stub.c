/* libnvidia-ml.so as far as perdure asks it, with the signatures of nvml.h: one GPU, whose counters
 * are the lines `name value` of the file that NVML_STUB names. A name that is not there is not
 * supported. For the tests of what lies between NVML's Python bindings and a verdict.
 * With `free_after N`, memory is free from the look number N + 1 on, and then a file `*.freed` is there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
enum { OK = 0, UNSUPPORTED = 3, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15 };

typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned pid; u64 used; unsigned gpu, compute; } process_t;
typedef struct { void *device; u64 type, data; unsigned gpu, compute; } event_t;

static int gpu; /* What its handle points to. */
static u64 xids_told;

static int find(const char *wanted, u64 *value)
{
    char name[64];
    u64 number;
    int found = 0;
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    while (file && fscanf(file, "%63s %llu", name, &number) == 2)
        if (!strcmp(name, wanted)) {
            *value = number;
            found = 1;
        }
    if (file)
        fclose(file);
    return found;
}

static int tell(const char *name, u64 *value)
{
    u64 lost;
    if (find("lost", &lost))
        return LOST;
    return find(name, value) ? OK : UNSUPPORTED;
}

static int tell_unsigned(const char *name, unsigned *value)
{
    u64 wide = 0;
    int code = tell(name, &wide);
    *value = (unsigned)wide;
    return code;
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &gpu; return OK; }

int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{
    u64 lost;
    snprintf(text, size, "GPU-5tub");
    return find("lost", &lost) ? LOST : OK;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size)
{
    snprintf(text, size, "Stub");
    return OK;
}

int nvmlEventSetCreate(void **set) { *set = &gpu; return OK; }
int nvmlDeviceRegisterEvents(void *device, u64 types, void *set) { return types == 8 ? OK : UNSUPPORTED; }

int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms)
{
    u64 count = 0, code = 0;
    find("xids", &count);
    if (xids_told >= count)
        return TIMEOUT;
    xids_told++;
    find("xid", &code);
    *event = (event_t){.device = &gpu, .type = 8, .data = code};
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    static u64 looks;
    char path[4096];
    u64 used = 400, most;
    FILE *file;
    find("used", &used);
    if (find("free_after", &most) && ++looks > most) {
        used = 400;
        snprintf(path, sizeof path, "%s.freed", getenv("NVML_STUB"));
        if ((file = fopen(path, "w")))
            fclose(file);
    }
    *memory = (memory_t){.total = used + 600, .free = 600, .used = used};
    return OK;
}

int nvmlDeviceGetRemappedRows(void *d, unsigned *corrected, unsigned *bad, unsigned *pending, unsigned *failed)
{
    tell_unsigned("remap_pending", pending);
    tell_unsigned("remap_failed", failed);
    *corrected = 5;
    return tell_unsigned("remapped", bad);
}

int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, u64 *count)
{
    if (counter != 0)
        return UNSUPPORTED;
    return tell(type == 1 ? "ecc_uncorrected" : "ecc_corrected", count);
}

int nvmlDeviceGetRetiredPages(void *device, unsigned cause, unsigned *count, u64 *pages)
{
    u64 known = 0;
    unsigned room = *count;
    int code = tell("double_bit_pages", &known);
    *count = cause == 1 ? (unsigned)known : 0;
    if (code != OK || *count == 0)
        return code;
    if (room < *count)
        return TOO_SMALL;
    memset(pages, 0, *count * sizeof *pages);
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, u64 *reasons) { return tell("reasons", reasons); }
int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz)
{
    return type == 1 ? tell_unsigned("sm_mhz", mhz) : UNSUPPORTED;
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned type, unsigned *mhz)
{
    return type == 1 ? tell_unsigned("sm_max_mhz", mhz) : UNSUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { return tell_unsigned("power_mw", mw); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { return tell_unsigned("limit_mw", mw); }
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *c)
{
    return sensor == 0 ? tell_unsigned("celsius", c) : UNSUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes)
{
    unsigned room = *count;
    u64 pid = 0, used = 400;
    int code = tell("pid", &pid);
    find("pid_used", &used);
    *count = pid != 0; /* 0: no process, which is known. */
    if (code != OK || !pid)
        return code;
    if (!room)
        return TOO_SMALL;
    processes[0] = (process_t){.pid = (unsigned)pid, .used = used};
    return OK;
}
