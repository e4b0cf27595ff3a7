// A thread that gives way to others of its process, for work that nobody waits for but its caller. Knows no interpreter.
//
// A caller waits until its call was run, so a low priority is never held by who holds a lock that others need: whoever
// calls from Python lets go of the interpreter's lock first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>

namespace tiercel {

// One such thread. Any thread may call; calls run one after the other.
class Background {
 public:
  Background();
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Run `call` on the thread and return what it returns.
  int64_t run(const std::function<int64_t()>& call);

  // Seconds that a processor has worked for the thread; 0 where that is not told.
  double cpu_s();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<int64_t()>* call_ = nullptr; // guarded by the mutex, as all below
  int64_t result_ = 0;
  bool is_done_ = false;
  bool is_ending_ = false;
  bool is_taken_ = false; // by a caller, from its call to its result
  std::thread thread_;
};

// What a writer of files does in the background; each returns -errno when it fails.

// Make a file of its owner's that was not there, locked by whoever gets the descriptor that is returned.
int64_t create_locked(const char* path);

// Write some of `data`; return how many bytes.
int64_t write_some(int fd, std::span<const uint8_t> data);

// Give a file its name, in place of another of that name.
int64_t rename_file(const char* path, const char* to);

} // namespace tiercel
