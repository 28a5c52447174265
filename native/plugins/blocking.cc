#include "plugins/blocking.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "plugins/submission.h"

namespace farandole::plugins {
namespace {

constexpr size_t kMostKept = 16384;

void wait_for(Engine& engine, Operation& operation) {
  // The engine fails an operation that takes longer than the job's limit.
  while (!engine.wait(operation, std::chrono::seconds(1))) {
  }
}

}  // namespace

Recurring KeptRequests::take(const std::string& name) {
  const std::lock_guard lock(mu_);
  auto found = kept_.extract(name);
  return found ? std::move(found.mapped()) : Recurring{};
}

void KeptRequests::keep(const std::string& name, Recurring recurring) {
  const std::lock_guard lock(mu_);
  if (kept_.size() < kMostKept) kept_.insert_or_assign(name, std::move(recurring));
}

void run_blocking(const Request& request, const std::string& name, const Listener& listener, Engine& engine,
                  KeptRequests& kept) {
  Recurring recurring = kept.take(name);
  OperationPtr operation;
  if (!recurring.operations.empty()) operation = std::move(recurring.operations.front());
  // The thread that has completed it may not have released it yet.
  if (operation.use_count() > 1) operation.reset();
  std::atomic_thread_fence(std::memory_order_acquire);
  const TensorView tensor = request.count > 0 ? view_of(request.tensors[0]) : TensorView{};
  const bool changed = build(operation, view_of(request, name), tensor, 0, 1, engine.size());
  recurring.operations.assign(1, operation);
  if (changed) recurring.arrange();
  if (!engine.run_in_lane(recurring, [] {})) {
    engine.submit(operation, false);
    wait_for(engine, *operation);
  }
  report(listener, *operation);
  operation.reset();
  kept.keep(name, std::move(recurring));
}

void PostedMessage::finish(const Listener& listener) {
  wait_for(*engine_, *transfer_);
  report(listener, *transfer_);
}

std::unique_ptr<PostedMessage> post_message(const Message& message, std::shared_ptr<Engine> engine) {
  auto transfer = std::make_shared<Transfer>();
  transfer->request.name = message.name;
  transfer->request.dtype = DType::UInt8;
  transfer->request.shape = {static_cast<int64_t>(message.bytes)};
  transfer->input = transfer->output = static_cast<std::byte*>(message.data);
  transfer->peer = message.peer;
  transfer->tag = message.tag;
  transfer->sends = message.sends;
  engine->post(transfer);
  return std::make_unique<PostedMessage>(std::move(engine), std::move(transfer));
}

}  // namespace farandole::plugins
