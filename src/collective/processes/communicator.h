// The threads around a process's Protocol: any number that wait, and one that answers.
// Who uses it: c_api.cc makes the one of the process; Group and Python exchange through it. It must
// not know what carries messages (transport.h), nor their meaning (protocol.h).
//
// A waiting thread drives the transport itself, which saves two thread switches; the communicator's
// thread answers other processes while no thread waits. Waiting spins briefly and then
// sleeps, always without the mutex.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "collective/processes/process_group.h"
#include "collective/processes/protocol.h"
#include "collective/processes/transport.h"

namespace syncbn {

class Communicator : public ProcessGroup {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport);
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const override { return size_; }
  Bytes AllReduce(Contribution contribution) override;
  Generation generation() const override;
  void Fail(const std::string& text) override;

  // The text of the failure; empty if nothing has failed.
  std::string Failure() const;
  // Forgets a failure; every rank must call it before exchanges work again.
  void Reset();

  // 0, 1, ... for each name, from zero in each generation: for keys of calls that match by order.
  int64_t NextNumber(const std::string& name);

  // Contributes nothing to others' exchanges until every rank has joined. Returns the rank that
  // made the most exchanges, the same on every rank. Throws Error if a rank fails or, when
  // nothing was heard for `timeout_seconds`, does not answer.
  int Join(double timeout_seconds);

  // Tells the other ranks that this process ends, and ends its waits. Returns at once.
  void Leave();
  // Waits until every other rank has left as well; false if one does not answer, or if that
  // takes longer than the timeout, which is short after a failure.
  bool AwaitLeave(double timeout_seconds);
  // Ends the thread and the use of the transport. Nothing works afterwards.
  void Stop();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void Work();
  bool ServeLocked();
  template <typename Predicate>
  void WaitLocked(Lock* lock, const Predicate& over);
  void CheckNotForked(const std::string& title) const;

  const std::unique_ptr<Transport> transport_;
  const int rank_, size_;
  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  Protocol protocol_;
  bool closed_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// The communicator of this process; null until OpenCommunicator. Never destroyed, because operators
// may outlive static destructors.
Communicator* TheCommunicator();
void OpenCommunicator(std::unique_ptr<Transport> transport);

}  // namespace syncbn
