#include "engine/wire.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/int8_blocks.h"
#include "engine/wire_values.h"

namespace farandole {
namespace {

enum class Tag : uint8_t { CollectedRequests = 1, Plan = 2, Departure = 3, Heartbeat = 4 };

constexpr size_t kMostReserved = 4096;  // entries; the count of a damaged message may be wrong

/// Encodings of a request item, or of an entry of a bucket.
enum class Item : uint8_t { SendersNumbers = 0, RanksNumbers = 1, FullRequest = 2, WithInput = 3 };
enum class Form : uint8_t { NumberRange = 0, Full = 1, WithRequest = 2, WithResult = 3 };

void write(Writer& w, const Request& request) {
  w.text(request.name);
  w.byte(static_cast<uint8_t>(request.kind));
  w.byte(static_cast<uint8_t>(request.dtype));
  w.byte(static_cast<uint8_t>(request.op));
  w.byte(request.cacheable ? 1 : 0);
  w.byte(request.on_device ? 1 : 0);
  w.real(request.prescale);
  w.real(request.postscale);
  w.integer(request.root);
  w.integers(request.shape);
  w.integers(request.splits);
  w.text(request.group);
  w.number(request.group_size);
}

Request read_request(Reader& r) {
  Request request;
  request.name = r.text();
  request.kind = static_cast<Kind>(r.below(kKinds));
  request.dtype = static_cast<DType>(r.below(kDTypes));
  request.op = static_cast<ReduceOp>(r.below(kReduceOps));
  request.cacheable = r.below(2) != 0;
  request.on_device = r.below(2) != 0;
  request.prescale = r.real();
  request.postscale = r.real();
  request.root = r.small_integer();
  request.shape = r.sizes();
  request.splits = r.sizes();
  request.group = r.text();
  request.group_size = r.small_number();
  // The negotiator reads the first dimension of these without a check.
  if (traits_of(request.kind).is_ragged && request.shape.empty()) Reader::fail();
  return request;
}

void write(Writer& w, const Error& error) {
  w.byte(static_cast<uint8_t>(error.kind));
  w.text(error.name);
  w.text(error.reason);
  w.text(error.what_differs);
  w.integer(error.rank);
  w.real(error.waited);
  w.number(error.ranks.size());
  for (const int rank : error.ranks) w.integer(rank);
  w.number(error.asked.size());
  for (const auto& [rank, text] : error.asked) {
    w.integer(rank);
    w.text(text);
  }
}

Error read_error(Reader& r) {
  const auto kind = static_cast<ErrorKind>(r.byte());
  std::string name = r.text();
  std::string reason = r.text();
  std::string what = r.text();
  const int32_t lost = r.small_integer();
  const double waited = r.real();
  std::vector<int> ranks(r.count());
  for (int& rank : ranks) rank = r.small_integer();
  std::map<int, std::string> asked;
  for (size_t left = r.count(); left > 0; --left) {
    const int rank = r.small_integer();
    asked[rank] = r.text();
  }
  // The only errors that end a negotiation.
  if (kind == ErrorKind::Joined) return Error::joined(std::move(name), std::move(reason));
  if (kind == ErrorKind::Mismatch) return Error::mismatch(std::move(name), std::move(what), std::move(asked));
  if (kind == ErrorKind::PeerLost) return Error::peer_lost(std::move(name), lost, std::move(reason));
  if (kind == ErrorKind::Timeout) return Error::timeout(std::move(name), std::move(ranks), waited);
  Reader::fail();
}

/// Writes a run of numbers, which ends before kNoId.
void write_run(Writer& w, uint32_t first, uint32_t count) {
  w.number(first);
  w.number(count);
}

std::pair<uint32_t, uint32_t> read_run(Reader& r) {
  const uint32_t first = r.small_number();
  const uint32_t count = r.small_number();
  if (count == 0 || uint64_t{first} + count > kNoId) Reader::fail();
  return {first, count};
}

void write(Writer& w, const NumberRange& numbers) {
  if (numbers.rank == kSender) {
    w.byte(static_cast<uint8_t>(Item::SendersNumbers));
  } else {
    w.byte(static_cast<uint8_t>(Item::RanksNumbers));
    w.integer(numbers.rank);
    w.byte(numbers.whole ? 1 : 0);
  }
  write_run(w, numbers.first, numbers.count);
}

CollectedRequests::value_type read_item(Reader& r) {
  const auto item = static_cast<Item>(r.below(4));
  if (item == Item::FullRequest) {
    const int32_t rank = r.rank();
    return FullRequest{rank, read_request(r)};
  }
  if (item == Item::WithInput) {
    RequestWithInput carrying{r.rank(), 0, {}};
    carrying.id = r.small_number();
    carrying.input = r.bytes();
    return carrying;
  }
  NumberRange numbers;
  if (item == Item::RanksNumbers) {
    numbers.rank = r.rank();
    numbers.whole = r.below(2) != 0;
  }
  std::tie(numbers.first, numbers.count) = read_run(r);
  return numbers;
}

void write(Writer& w, const Knobs& knobs) {
  for (const size_t size : {knobs.fusion_threshold, knobs.slot_bytes, knobs.link_chunk, knobs.link_small})
    w.number(size);
  w.byte(knobs.hierarchical ? 1 : 0);
}

Knobs read_knobs(Reader& r) {
  Knobs knobs;
  for (size_t* size : {&knobs.fusion_threshold, &knobs.slot_bytes, &knobs.link_chunk, &knobs.link_small})
    *size = r.number();
  knobs.hierarchical = r.below(2) != 0;
  if (!knobs.valid()) Reader::fail();
  return knobs;
}

/// The number of leading `entries` that make one run of numbers, and the numbers in it.
std::pair<size_t, uint32_t> run_of(std::span<const Entry> entries) {
  size_t length = 1;
  uint32_t count = entries[0].count;
  while (length < entries.size() && entries[length].is_number() && entries[length].id == entries[0].id + count)
    count += entries[length++].count;
  return {length, count};
}

void write(Writer& w, const Bucket& bucket) {
  w.byte(static_cast<uint8_t>(bucket.kind));
  const std::span<const Entry> entries(bucket.entries);
  size_t forms = 0;
  for (size_t at = 0; at < entries.size(); ++forms)
    at += entries[at].is_number() ? run_of(entries.subspan(at)).first : 1;
  w.number(forms);
  for (size_t at = 0; at < entries.size();) {
    const Entry& entry = entries[at];
    if (entry.is_number()) {
      const auto [length, count] = run_of(entries.subspan(at));
      w.byte(static_cast<uint8_t>(Form::NumberRange));
      write_run(w, entry.id, count);
      at += length;
    } else if (!entry.result.empty()) {
      w.byte(static_cast<uint8_t>(Form::WithResult));
      w.number(entry.id);
      w.bytes(entry.result);
      ++at;
    } else {
      w.byte(static_cast<uint8_t>(entry.request ? Form::WithRequest : Form::Full));
      w.number(entry.id);
      w.text(entry.name);
      w.integers(entry.sizes);
      if (entry.request) write(w, *entry.request);
      ++at;
    }
  }
}

Bucket read_bucket(Reader& r) {
  Bucket bucket;
  bucket.kind = static_cast<Kind>(r.below(kKinds));
  const size_t count = r.count();
  if (count == 0) Reader::fail();
  bucket.entries.reserve(std::min(count, kMostReserved));
  for (size_t i = 0; i < count; ++i) {
    Entry& entry = bucket.entries.emplace_back();
    const auto form = static_cast<Form>(r.below(4));
    if (form == Form::NumberRange) {
      std::tie(entry.id, entry.count) = read_run(r);
      continue;
    }
    entry.id = r.small_number();
    if (form == Form::WithResult) {
      entry.result = r.bytes();
      if (entry.result.empty()) Reader::fail();
      continue;
    }
    entry.name = r.text();
    entry.sizes = r.sizes();
    if (form == Form::WithRequest) entry.request = read_request(r);
  }
  return bucket;
}

}  // namespace

void encode(const CollectedRequests& collected, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::CollectedRequests));
  w.number(collected.size());
  for (const auto& item : collected) {
    if (const auto* numbers = std::get_if<NumberRange>(&item)) {
      write(w, *numbers);
      continue;
    }
    if (const auto* carrying = std::get_if<RequestWithInput>(&item)) {
      w.byte(static_cast<uint8_t>(Item::WithInput));
      w.integer(carrying->rank);
      w.number(carrying->id);
      w.bytes(carrying->input);
      continue;
    }
    const auto& full = std::get<FullRequest>(item);
    w.byte(static_cast<uint8_t>(Item::FullRequest));
    w.integer(full.rank);
    write(w, full.request);
  }
  w.close();
}

void encode(const Plan& plan, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Plan));
  w.number(plan.size());
  for (const auto& item : plan) {
    w.byte(static_cast<uint8_t>(item.index()));
    if (const auto* bucket = std::get_if<Bucket>(&item)) {
      write(w, *bucket);
    } else if (const auto* refusal = std::get_if<Refusal>(&item)) {
      w.text(refusal->name);
      write(w, refusal->error);
    } else {
      write(w, std::get<Knobs>(item));
    }
  }
  w.close();
}

void encode(const Departure& departure, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Departure));
  w.integer(departure.rank);
  w.byte(departure.clean ? 1 : 0);
  w.text(departure.reason);
  w.integer(departure.first);
  w.close();
}

void encode(const Heartbeat&, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Heartbeat));
  w.close();
}

uint32_t frame_length(std::span<const std::byte> header) {
  uint32_t length = 0;
  for (size_t i = 0; i < kFrameHeader; ++i) length |= static_cast<uint32_t>(header[i]) << (8 * i);
  if (length == 0 || length > kLongestFrame) Reader::fail();
  return length;
}

Message decode(std::span<const std::byte> body) {
  Reader r(body);
  Message message;
  switch (static_cast<Tag>(r.byte())) {
    case Tag::CollectedRequests: {
      CollectedRequests collected;
      for (size_t left = r.count(); left > 0; --left) collected.push_back(read_item(r));
      message = std::move(collected);
      break;
    }
    case Tag::Plan: {
      Plan plan;
      for (size_t left = r.count(); left > 0; --left) {
        const uint8_t form = r.below(3);
        if (form == 0) {
          plan.emplace_back(read_bucket(r));
        } else if (form == 2) {
          plan.emplace_back(read_knobs(r));
        } else {
          // Not within the braces: GCC 11 destroys no earlier member when a later one's expression throws (PR 66139).
          std::string name = r.text();
          Error error = read_error(r);
          plan.emplace_back(Refusal{std::move(name), std::move(error)});
        }
      }
      message = std::move(plan);
      break;
    }
    case Tag::Departure: {
      Departure departure;
      departure.rank = r.small_integer();
      departure.clean = r.below(2) != 0;
      departure.reason = r.text();
      departure.first = r.small_integer();
      message = std::move(departure);
      break;
    }
    case Tag::Heartbeat: message = Heartbeat{}; break;
    default: Reader::fail();
  }
  if (!r.at_end()) Reader::fail();
  return message;
}

}  // namespace farandole
