// The processes of one program, and how a process exchanges numbers with the others.
// Who uses it: c_api.cc makes the one of the process; Group and Python exchange through it. It must
// not know what carries messages (transport.h), nor what the bytes mean.
//
// What the processes promise each other:
// * Exchanges match by key. Ranks may begin them in any order, and many may be in flight.
// * Payloads are reduced in the order of ranks, and every rank gets the same bytes.
// * Every wait ends: with the result, or with an error that names the ranks that are missing, and
//   says of each whether it lives. A rank that dies is named within the timeout of its death.
// * A failure of one rank is a failure of all: every exchange ends with its text, on every rank,
//   and none begins before that rank has reset. Ranks may reset at different times; messages carry
//   the generation, so old ones are ignored and early ones kept.
// * A rank that has joined contributes nothing more, but reduces and passes on what others
//   contribute, until all ranks have joined. Then a new generation begins.
// * A rank that leaves says so, and exchanges that need it end at once.
//
// protocol.h has the rules, without threads or clock. This class adds both: any number of threads
// that wait, and one that answers.
// A waiting thread drives the transport itself, which saves two thread switches; the communicator's
// thread answers other processes while no thread waits. Waiting spins briefly and then
// sleeps, always without the mutex.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "collective/processes/protocol.h"
#include "collective/processes/transport.h"

namespace syncbn {

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport);
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

  // Blocks until every rank has contributed or has joined; returns all payloads reduced in the
  // order of ranks, the same bytes on every rank. Throws Error that names the ranks present and
  // missing if that takes longer than the timeout, if signatures differ, or if another rank has
  // failed.
  Bytes AllReduce(Contribution contribution);

  // Fails the exchanges of this process and of all others, until Reset.
  void Fail(const std::string& text);
  // The text of the failure; empty if nothing has failed.
  std::string Failure() const;
  // Forgets a failure; every rank must call it before exchanges work again.
  void Reset();

  // The key of the next call of this name, for calls that match by their order in each generation.
  std::string NextKey(const std::string& name);

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
  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  Protocol protocol_;
  bool closed_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// To the processes that this one was started with; null until OpenCommunicator. Never destroyed,
// because operators may outlive static destructors.
Communicator* TheCommunicator();
void OpenCommunicator(std::unique_ptr<Transport> transport);

}  // namespace syncbn
