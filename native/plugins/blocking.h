#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/engine.h"
#include "engine/recurring.h"
#include "engine/transfers.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

/// The operations of blocking requests of one process set, by name, for their next use. Any thread may use it.
class KeptRequests {
 public:
  [[nodiscard]] Recurring take(const std::string& name);
  void keep(const std::string& name, Recurring recurring);

 private:
  std::mutex mu_;
  std::unordered_map<std::string, Recurring> kept_;
};

/// Runs `request` under `name` and reports its outcome to the listener. Blocks. If it throws Error, the listener was
/// not called.
void run_blocking(const Request& request, const std::string& name, const Listener& listener, Engine& engine,
                  KeptRequests& kept);

/// A message under way.
class PostedMessage {
 public:
  PostedMessage(std::shared_ptr<Engine> engine, TransferPtr transfer)
      : engine_(std::move(engine)), transfer_(std::move(transfer)) {}

  [[nodiscard]] const char* name() const { return transfer_->request.name.c_str(); }

  /// Reports the outcome to the listener; blocks until it is known.
  void finish(const Listener& listener);

 private:
  std::shared_ptr<Engine> engine_;
  TransferPtr transfer_;
};

/// Starts `message`. Throws Error.
[[nodiscard]] std::unique_ptr<PostedMessage> post_message(const Message& message, std::shared_ptr<Engine> engine);

}  // namespace farandole::plugins
