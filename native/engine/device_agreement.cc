#include "engine/device_agreement.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <span>

namespace farandole {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

/// Returns why these ranks cannot use NCCL; empty if they can.
std::string obstacle(const std::vector<DeviceCard>& cards, const std::vector<int>& members) {
  const auto number = [&members](size_t rank) { return std::to_string(job_rank(static_cast<int>(rank), members)); };
  for (size_t rank = 0; rank < cards.size(); ++rank)
    if (!cards[rank].is_able) return "rank " + number(rank) + " cannot use NCCL (" + cards[rank].why_not.data() + ")";
  std::map<std::array<char, 16>, size_t> owners;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].version != cards[0].version)
      return "rank " + number(0) + " has NCCL " + version_text(cards[0].version) + ", and rank " + number(rank) +
             " has " + version_text(cards[rank].version) + "; install one version on all hosts";
    const auto [owner, fresh] = owners.try_emplace(cards[rank].gpu, rank);
    if (!fresh && !(cards[owner->second].may_share && cards[rank].may_share))
      return "ranks " + number(owner->second) + " and " + number(rank) +
             " are on the same GPU; let each use the one at its local rank";
  }
  return "";
}

}  // namespace

std::optional<Error> DeviceDecision::refusal(const Request& request) const {
  if (why_not.empty() || !by_nccl[static_cast<size_t>(request.kind)]) return std::nullopt;
  std::string kind = name_of(request.kind);
  std::ranges::transform(kind, kind.begin(), [](unsigned char letter) { return std::toupper(letter); });
  return Error::invalid(request.name, "NCCL is required (HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_" + kind +
                                          "), but it cannot be used: " + why_not +
                                          ". Set the variable to MPI to use host memory instead");
}

bool excludes_nccl(const std::array<bool, kKinds>& through_host) {
  return std::ranges::all_of(std::span(through_host).first(static_cast<size_t>(Kind::Barrier)), std::identity());
}

DeviceDecision decide(const std::vector<DeviceCard>& cards, const std::vector<int>& members) {
  DeviceDecision made;
  for (const DeviceCard& card : cards)
    for (size_t kind = 0; kind < kKinds; ++kind) {
      made.through_host[kind] = made.through_host[kind] || card.through_host[kind];
      made.by_nccl[kind] = made.by_nccl[kind] || card.by_nccl[kind];
    }
  made.why_not = obstacle(cards, members);
  made.is_by_settings = std::ranges::all_of(cards, excludes_nccl, &DeviceCard::through_host);
  return made;
}

bool shares_process(const std::vector<DeviceCard>& cards, int rank) {
  const auto& own = cards[static_cast<size_t>(rank)].process;
  return std::ranges::count(cards, own, &DeviceCard::process) > 1;
}

}  // namespace farandole
