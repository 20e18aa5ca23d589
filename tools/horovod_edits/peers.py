"""Edits to Gloo: a port on which a rank waits for another one takes nobody else.

Each pair of ranks has a port of its own, and the first connection to it was the peer: who scanned ports while a job
started took a peer's place, and what he sent ended the job (`terminate called ... IoException`). Now a rank publishes
random bytes, the token, beside its address. They are the first that a peer sends; other callers are dropped.
"""

from __future__ import annotations

from horovod_edits.edit import Edit

_TCP = "third_party/gloo/gloo/transport/tcp"

PEER_EDITS = [
    # The token, as a part of the address.
    Edit(
        path=f"{_TCP}/address.h",
        old="#include <mutex>\n",
        new="#include <array>\n#include <mutex>\n",
        reason="for the token",
    ),
    Edit(
        path=f"{_TCP}/address.h",
        old="  static Address fromSockName(int fd);\n",
        new="""\
  // What whoever connects to this address must send first.
  using Token = std::array<unsigned char, 16>;

  const Token& token() const {
    return impl_.token;
  }

  void makeToken();

  // Takes the same time for every other token.
  bool hasToken(const Token& other) const;

  static Address fromSockName(int fd);
""",
        reason="declares it",
    ),
    Edit(
        path=f"{_TCP}/address.h",
        old="    sequence_number_t seq{kSequenceNumberUnset};\n",
        new="    sequence_number_t seq{kSequenceNumberUnset};\n\n    Token token{};\n",
        reason="published and sent with the address",
    ),
    Edit(
        path=f"{_TCP}/address.cc",
        old="  impl_.ss = std::move(other.impl_.ss);\n  impl_.seq = other.impl_.seq;\n",
        new="  impl_ = other.impl_;\n",
        reason="a copy has the token as well",
    ),
    Edit(
        path=f"{_TCP}/address.cc",
        old="  impl_.ss = other.impl_.ss;\n  impl_.seq = other.impl_.seq;\n",
        new="  impl_ = other.impl_;\n",
        reason="the same",
    ),
    Edit(
        path=f"{_TCP}/address.cc",
        old="Address::Address(const Address& other)\n    : Address(other.impl_.ss, other.impl_.seq) {}\n",
        new="""\
Address::Address(const Address& other) : impl_(other.impl_) {}

void Address::makeToken() {
  std::random_device random;
  for (auto& byte : impl_.token) {
    byte = random();
  }
}

bool Address::hasToken(const Token& other) const {
  unsigned char difference = 0;
  for (size_t i = 0; i < other.size(); i++) {
    difference |= impl_.token[i] ^ other[i];
  }
  return difference == 0;
}
""",
        reason="the same; and what address.h declares",
    ),
    Edit(
        path=f"{_TCP}/address.cc",
        old="#include <mutex>\n",
        new="#include <mutex>\n#include <random>\n",
        reason="std::random_device",
    ),
    # The side that listens.
    Edit(
        path=f"{_TCP}/pair.h",
        old="  std::mutex m_;\n  std::condition_variable cv_;\n",
        new="""\
  // Who has connected to the listening port, and has not sent the token yet.
  struct Caller {
    int fd;
    size_t nread;
    Address::Token token;
  };
  std::list<Caller> callers_;

  // Close the connection of a caller, or of all.
  std::list<Caller>::iterator dropCaller(std::list<Caller>::iterator caller);
  void dropCallers();

  std::mutex m_;
  std::condition_variable cv_;
""",
        reason="any number of strangers may connect before the peer does",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="  auto fd = socket(attr.ai_family, attr.ai_socktype, attr.ai_protocol);\n",
        new="  auto fd = socket(attr.ai_family, attr.ai_socktype | SOCK_NONBLOCK, attr.ai_protocol);\n",
        reason="a caller who has gone again must not make accept(2) wait for the next",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="  self_ = Address::fromSockName(fd);\n\n  // Register with device",
        new="  self_ = Address::fromSockName(fd);\n  self_.makeToken();\n\n  // Register with device",
        reason="a token for each pair",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="""\
  struct sockaddr_storage addr;
  socklen_t addrlen = sizeof(addr);
  int rv;

  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);

  // Close the listening file descriptor whether we've successfully connected
  // or run into an error and will throw an exception.
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);
  fd_ = FD_INVALID;

  if (rv == -1) {
    signalException(GLOO_ERROR_MSG("accept: ", strerror(errno)));
    return;
  }

  // Connected, replace file descriptor
  fd_ = rv;

  // Common connection-made code
  handleConnected();
}
""",
        new="""\
  // An event does not say which descriptor it is about. Look at all.
  int fd = accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd != -1) {
    if (callers_.size() == kMaxCallers) {
      dropCaller(callers_.begin());
    }
    callers_.push_back({fd, 0, {}});
    device_->registerDescriptor(fd, EPOLLIN, this);
  } else if (errno == EMFILE || errno == ENFILE) {
    signalException(GLOO_ERROR_MSG("accept: ", strerror(errno)));
    return;
  }

  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const auto rv = ::recv(
        caller->fd,
        caller->token.data() + caller->nread,
        caller->token.size() - caller->nread,
        0);
    if (rv == -1 && (errno == EAGAIN || errno == EINTR)) {
      ++caller;
      continue;
    }
    caller->nread += std::max<ssize_t>(rv, 0);
    if (rv > 0 && caller->nread < caller->token.size()) {
      ++caller;
      continue;
    }
    if (rv <= 0 || !self_.hasToken(caller->token)) {
      caller = dropCaller(caller);
      continue;
    }

    // It is the peer. Nobody else is waited for.
    device_->unregisterDescriptor(fd_, this);
    ::close(fd_);
    fd_ = caller->fd;
    callers_.erase(caller);
    dropCallers();
    handleConnected();
    return;
  }
}

std::list<Pair::Caller>::iterator Pair::dropCaller(
    std::list<Caller>::iterator caller) {
  device_->unregisterDescriptor(caller->fd, this);
  ::close(caller->fd);
  return callers_.erase(caller);
}

void Pair::dropCallers() {
  while (!callers_.empty()) {
    dropCaller(callers_.begin());
  }
}
""",
        reason="keeps listening until somebody knows the token",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;\n",
        new="constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;\n\n"
        "// A peer sends the token at once; of more callers, the oldest are dropped.\n"
        "constexpr size_t kMaxCallers = 64;\n",
        reason="silent callers must not use up the descriptors of the process",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="      case LISTENING:\n        // The pair may be in the LISTENING state when it is destructed.\n",
        new="      case LISTENING:\n        // The pair may be in the LISTENING state when it is destructed.\n        dropCallers();\n",
        reason="callers go with the port",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old="  // State must be <= CONNECTED.\n"
        "  // If state is CLOSED; this function will NOT be called. Refer to\n"
        "  // Pair::changeState and Device::unregisterDescriptor for more info.\n"
        "  GLOO_ENFORCE_LE(state_, CONNECTED);\n",
        new="  // An event about a caller may come after another one that closed the pair.\n"
        "  if (state_ == CLOSED) {\n    return;\n  }\n",
        reason="a pair has several descriptors while it listens",
    ),
    # The side that connects.
    Edit(
        path=f"{_TCP}/pair.cc",
        old="  // First destroy listening socket.\n",
        new="  // First destroy listening socket.\n  dropCallers();\n",
        reason="nobody is expected at this side's port",
    ),
    Edit(
        path=f"{_TCP}/pair.cc",
        old='        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));\n    return;\n  }\n',
        new="""\
        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));
    return;
  }

  // A fresh connection has room for the token.
  const auto& token = peer_.token();
  const ssize_t sent = ::send(fd_, token.data(), token.size(), MSG_NOSIGNAL);
  if (sent != ssize_t(token.size())) {
    signalException(
        GLOO_ERROR_MSG("send ", peer_.str(), ": ", strerror(errno)));
    return;
  }
""",
        reason="says who it is",
    ),
    # A rank that cannot connect.
    Edit(
        path="horovod/common/operations.cc",
        old="""\
#if HAVE_GLOO
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context""",
        new="""\
#if HAVE_GLOO
  try {
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context""",
        reason="an exception in this thread aborted the process (status 134)",
    ),
    Edit(
        path="horovod/common/operations.cc",
        old="    state.process_set_table.Initialize(global_gloo_context);\n  }\n#endif // HAVE_GLOO\n",
        new="""\
    state.process_set_table.Initialize(global_gloo_context);
  }
  } catch (const std::exception& ex) {
    LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
    state.initialization_failed = true;
    return;
  }
#endif // HAVE_GLOO
""",
        reason="hvd.init() raises instead, as it does where a process set cannot be made",
    ),
]
